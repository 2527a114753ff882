"""The paper's numbers: rounds and simulated minutes to its targets, mean and standard deviation."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from fadamgc.federation.cost import CostModel, traffic
from fadamgc.federation.sampling import Draw
from fadamgc.methods import make_algorithm

METHODS = ("fedavg_m", "scaffold_m", "fedadam", "fedams", "local_adam", "fa_nt", "fadamgc")
Numbers: TypeAlias = dict[str, tuple[float, float]]  # by method: mean and standard deviation


class PaperRow(NamedTuple):
    """The numbers of one data set."""

    target: float  # accuracy
    rounds: Numbers
    minutes: Numbers


def _rows(methods: tuple[str, ...], table: str) -> dict[str, PaperRow]:
    """Read a table: for each data set its name, its target and the rounds; then a line with the minutes."""

    def numbers(text: str) -> Numbers:
        words = [tuple(map(float, word.split("±"))) for word in text.split()]
        return {name: (mean, std) for name, (mean, std) in zip(methods, words, strict=True)}

    cells = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    return {
        name: PaperRow(float(target), numbers(rounds), numbers(minutes))
        for (name, target, rounds), (*_, minutes) in zip(cells[::2], cells[1::2], strict=True)
    }


# The main table.
MAIN = _rows(
    METHODS,
    """
main-cifar10      | 0.75 | 1014.5±250.3 544.3±59.9 2532.5±343.3 2388.8±286.6 589.5±74.0 394.8±31.3 310.0±16.8
                  |      | 182.6±45.1 157.8±17.38 303.9±41.2 286.7±34.4 70.7±8.9 82.7±6.6 65.1±3.5
main-cifar100     | 0.5  | 998.5±88.5 621.8±55.4 1854.0±185.3 1654.0±156.4 678.3±40.6 530.3±17.6 323.8±16.3
                  |      | 179.7±15.9 180.3±16.1 222.5±22.2 198.5±18.8 81.4±4.9 111.4±3.7 68.0±3.4
main-tinyimagenet | 0.3  | 215.5±10.4 242.2±15.4 543.2±45.2 463.5±35.7 177.3±8.3 157.0±6.4 66.3±4.4
                  |      | 38.8±1.9 70.2±4.5 65.2±5.4 55.6±4.3 21.3±1.0 33.0±1.3 13.9±0.9
main-20news       | 0.75 | 245.5±27.6 214.0±17.7 247.0±8.1 224.5±5.4 156.8±7.8 155.0±7.0 143.3±4.1
                  |      | 34.4±3.9 35.1±2.9 31.6±1.0 28.7±0.7 20.1±1.0 22.6±1.0 20.9±0.6
main-qnli         | 0.75 | 171.3±41.2 162.5±37.4 137.5±10.2 145.0±9.8 117.0±10.4 99.8±11.2 55.5±16.3
                  |      | 24.8±6.0 27.4±6.3 18.2±1.4 19.2±1.3 15.5±1.4 15.0±1.7 8.4±2.5
main-qqp          | 0.75 | 316.5±64.3 299.0±70.3 245.3±20.5 267.8±22.1 213.0±53.8 196.3±5.1 63.0±4.6
                  |      | 76.7±15.6 79.6±18.7 56.5±4.7 61.7±5.1 49.1±12.4 48.7±1.3 15.6±1.1
main-sst2         | 0.85 | 150.5±36.1 129.8±32.5 84.3±4.2 78.8±4.4 47.0±5.8 48.8±8.4 30.3±7.3
                  |      | 127.7±36.1 114.7±32.5 74.5±4.2 69.7±4.4 41.3±5.8 43.1±8.4 26.8±7.3
""",
)

# The appendix's table on beta_2, by the labels of the study's methods. It has no LocalAdam with beta_2 = 0.
BETA2 = _rows(
    ("LocalAdam, b2 = 0.99", "FA-NT, b2 = 0", "FAdamGC, b2 = 0", "FA-NT, b2 = 0.99", "FAdamGC, b2 = 0.99"),
    """
CIFAR-10      | 0.75 | 589.5±74.0 401.5±33.9 358.8±21.4 394.8±31.3 310.0±16.8
              |      | 72.38±74.0 83.44±33.9 74.56±21.4 82.07±31.3 64.42±16.8
CIFAR-100     | 0.5  | 678.3±40.6 867.5±25.3 527.0±16.5 530.3±17.6 323.8±16.3
              |      | 83.36±40.6 180.27±25.3 109.56±16.5 110.21±17.6 67.2±16.3
Tiny ImageNet | 0.3  | 177.3±8.3 164.3±6.7 85.5±5.7 157.0±6.4 66.3±4.4
              |      | 21.78±8.3 34.15±6.7 17.77±5.7 32.63±6.4 13.78±4.4
""",
)

# What gives the paper's minutes from its rounds (docs/readings.md): how many numbers of a model are sent, and
# the seconds of local training in a round. Images: ResNet-18, texts: the LoRA part of GPT-2.
SENT_NUMBERS_AND_TRAINING = {
    "main-cifar10": (11_250_000, 0.0),
    "main-cifar100": (11_250_000, 0.0),
    "main-tinyimagenet": (11_250_000, 0.0),
    "main-20news": (2_250_000, 6.25),
    "main-qnli": (2_312_500, 6.47),
    "main-qqp": (2_218_750, 12.4),
}


def minutes_of_rounds() -> dict[str, dict[str, tuple[float, float]]]:
    """Return the minutes that our cost model gives for the paper's rounds, and the paper's minutes.

    By data set of the main table and by method; S = 10 clients take part, of which S~ = S/2 track with FA-NT
    and FAdamGC. SST-2 is missing, since no such model fits its minutes.
    """
    S, K = 10, 60
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for data_set, (numbers, training) in SENT_NUMBERS_AND_TRAINING.items():
        cost = CostModel(down_mbps=100, up_mbps=100, seconds_per_step=training / K)
        found[data_set] = {}
        for name in METHODS:
            tracked = range(S // 2) if name in ("fa_nt", "fadamgc") else range(S)
            work = traffic(make_algorithm(name), numbers).work(Draw((*range(S),), (*tracked,)), steps=[K] * S)
            row = MAIN[data_set]
            found[data_set][name] = row.rounds[name][0] * cost.seconds(work) / 60, row.minutes[name][0]
    return found
