import radixkv
from radixkv.models.small_model import prepare_small_model

engine = radixkv.Engine.from_pretrained(prepare_small_model(progress=True))  # or a path, a hub id
guide = "Handbook: the mill opens in April. " * 40
for question in ("When does the mill open?", "Is it open in March?"):
    result = engine.generate(guide + question, max_new_tokens=12, temperature=0)
    print(result.cached_tokens, "of", len(result.prompt_token_ids), "prompt tokens from the cache")
