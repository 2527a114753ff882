"""LoRA on texts: twelve clients train adapters of a small transformer; the test texts have words new to them.

Each client writes mostly about one of three subjects. The base model, all-MiniLM-L6-v2, is frozen. Only the
adapters in its last layer and the head are trained and sent: 13,443 numbers; the model has 22.7 million.

python examples/lora_texts.py [FIGURE]      (pip install 'fadamgc[text]')
"""

import random
import sys

from matplotlib.figure import Figure

import fadamgc

TRAIN = {
    "animals": ["fox", "owl", "horse", "salmon", "rabbit", "crow", "bear", "goat"],
    "food": ["bread", "soup", "cheese", "rice", "plum", "honey", "lentils", "pie"],
    "tools": ["hammer", "saw", "drill", "wrench", "chisel", "ladder", "pliers", "rake"],
}
TEST = {
    "animals": ["wolf", "heron", "donkey", "trout", "squirrel"],
    "food": ["noodles", "pear", "omelette", "butter", "beans"],
    "tools": ["screwdriver", "axe", "spade", "clamp", "crowbar"],
}
VERBS = ["I saw", "we found", "she wrote about", "nobody wanted", "they spoke of", "he drew"]
PLACES = ["in the valley", "behind the house", "near the market", "by the road", "in the shed"]
draw = random.Random(0)


def text(word: str) -> str:
    """Return a short text about a word."""
    return f"{draw.choice(VERBS)} the {word} {draw.choice(PLACES)}"


train = [
    {"text": text(draw.choice(words)), "label": subject, "client": f"writer {client}"}
    for client in range(12)
    for number, (subject, words) in enumerate(TRAIN.items())
    for _ in range(20 if client % 3 == number else 2)
]
test = [{"text": text(word), "label": label} for label, words in TEST.items() for word in words * 4]
task = fadamgc.tasks.text(data=train, client="client", test=test, upper_layers=1)
run = fadamgc.simulate(
    fadamgc.FAdamGC(eta_l=3e-3), task, rounds=10, sampled=4, local_epochs=2, batch_size=8, eval_clients=True
)
print(f"{len(run.x)} numbers are trained; accuracy on new words: {run.history[-1].test_accuracy:.3f}")
print(run.predict(["the otter sleeps", "a slice of cake", "hand me the spanner"]))

figure = Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
table = run.to_pandas().set_index("round")
panel.plot(table["test_accuracy"], "o-", color="#0072B2", label="on words new to all")
panel.plot(table["clients: mean"], "k--", label="on the clients' own texts, mean")
panel.plot(table["clients: worst tenth"], "k:", label="the same, worst tenth of clients")
panel.set(xlabel="round", xticks=table.index, ylabel="accuracy", ylim=(0, 1.03))
panel.legend(frameon=False, loc="lower right")
if sys.argv[1:]:
    figure.savefig(sys.argv[1], dpi=120)
