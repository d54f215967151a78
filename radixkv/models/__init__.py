"""A model of transformers on pages; see README.md."""

from radixkv.models.small_model import prepare_small_model as prepare_small_model
