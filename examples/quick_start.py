import radixkv
from radixkv.models import prepare_small_model

engine = radixkv.Engine.from_pretrained(prepare_small_model(progress=True))  # or a path, a hub id
facts = "The mill opens in April and closes in October. A ticket costs four euros. " * 10


def chat(question):
    return [{"role": "system", "content": facts}, {"role": "user", "content": question}]


for question in ("When does the mill open?", "What does a ticket cost?"):
    result = engine.generate(chat(question), max_new_tokens=24, temperature=0)
    found, all_of_it = result.cached_tokens, len(result.prompt_token_ids)
    print(f"{result.text}  ({found} of {all_of_it} prompt tokens from the cache)")

for delta in engine.stream(chat("When does the mill close?"), max_new_tokens=24, temperature=0):
    print(delta.text, end="", flush=True)
print()

result = engine.generate(chat("Invent a name for the mill."), n=4, max_new_tokens=8, seed=1)
for sample in result.samples:
    print("-", sample.text)

with engine.open(chat("When does the mill open?")) as branch:
    print(branch.generate(max_new_tokens=24, temperature=0).text)
    questions = "When does it close?", "What does a ticket cost?"
    for question, fork in zip(questions, branch.fork(2), strict=True):
        with fork:  # shares the branch's pages
            fork.append([{"role": "user", "content": question}])
            print(fork.generate(max_new_tokens=24, temperature=0).text)

price = {"type": "object", "properties": {"euros": {"type": "integer"}}, "required": ["euros"]}
result = engine.generate(chat("What does a ticket cost?"), json_schema=price, temperature=0)
print(result.text)
