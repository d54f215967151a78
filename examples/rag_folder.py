"""Questions over a folder of texts: each text is read by the model once, whatever is asked of it.

Run it on a folder of your own: python examples/rag_folder.py FOLDER "question" ["question" ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import radixkv
from radixkv.models.small_model import prepare_small_model

FOLDER = Path(__file__).parent / "texts"
QUESTIONS = [
    "When was the mill built?",
    "What is shown on the pier in a storm?",
    "What is the name of the miller of the mill?",
]


def words(text: str) -> set[str]:
    """The words of a text that say something."""
    return {word.strip(".,?!").lower() for word in text.split() if len(word) > 3}


def best_text(texts: dict[str, str], question: str) -> str:
    """Name the text that shares the most words with the question."""
    return max(texts, key=lambda name: len(words(texts[name]) & words(question)))


def main(engine: radixkv.Engine, folder: Path = FOLDER, questions: list[str] = QUESTIONS) -> None:
    """Answer each question from the text that fits it best; say what was reused."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}
    for question in questions:
        name = best_text(texts, question)
        chat = [
            {"role": "system", "content": f"Answer from this text.\n\n{texts[name]}"},
            {"role": "user", "content": question},
        ]
        result = engine.generate(chat, temperature=0, max_new_tokens=16, stop=["\n"])
        print(f"{question} [{name}]\n  {result.text}")
        print(f"  {result.cached_tokens} of {len(result.prompt_token_ids)} tokens reused")


if __name__ == "__main__":
    with radixkv.Engine.from_pretrained(prepare_small_model(progress=True)) as engine:
        main(engine, *([Path(sys.argv[1]), sys.argv[2:]] if len(sys.argv) > 2 else []))
