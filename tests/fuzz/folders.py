"""Folders of runs, checkpoints and experiments: damaged, incomplete, and forged with right digests."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from .data import damage_bytes
from .harness import Target, Wrong
from .specs import command

SETTINGS: dict[str, Any] = {
    "sampled": 2,
    "local_steps": 2,
    "batch_size": 4,
    "executor": "loop",
    "progress": False,
}
SPEC = """
name = "small"
[task]
data = "quadratics"
clients = 3
dim = 2
[run]
rounds = 2
local_steps = 2
seeds = [0, 1]
[[method]]
algorithm = "fadamgc"
eta_l = 0.01
[[method]]
algorithm = "fedavg"
eta_l = 0.01
"""
KINDS = ("run", "memory", "files", "run", "memory", "files", "experiment")  # the last takes longest
BOMB = "bomb.gz"
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        1.5,
        10**30,
        1e308,
        "",
        "x",
        "../../evil",
        "/etc/passwd",
        [],
        [1],
        {},
        {"a": 1},
        [[]],
        "NaN",
    ),
)


def task() -> Any:
    from problems import class_task

    return class_task(sizes=(4, 6, 5))


def prepare(shared: Path) -> None:
    import fadamgc

    algorithm = fadamgc.FAdamGC(eta_l=0.01)
    for states in ("memory", "files"):
        fadamgc.simulate(algorithm, task(), rounds=2, states=states, checkpoint=shared / states, **SETTINGS)
    fadamgc.simulate(algorithm, task(), rounds=2, **SETTINGS).save(shared / "run")
    bomb(shared / BOMB)
    (shared / "spec.toml").write_text(SPEC)
    out = shared / "experiment"
    command("run", str(shared / "spec.toml"), "--out", str(out), "--workers", "1", "--quiet")
    rounds = fadamgc.simulate(algorithm, task(), rounds=4, **SETTINGS)
    np.save(shared / "x.npy", np.stack([fadamgc.load_run(shared / "run").x.numpy(), rounds.x.numpy()]))


def bomb(path: Path) -> None:
    """A gigabyte of zeros as a small file."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(1000):
            file.write(bytes(1 << 20))


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in KEPT)


KEPT = (".json", ".gz", ".safetensors", ".bin", ".toml", ".jsonl")


def damage(r: random.Random, folder: Path) -> None:
    """One change of the bytes of a folder."""
    found = files(folder)
    path = r.choice(found)
    match r.randrange(8):
        case 0:
            path.unlink()
        case 1:
            other = r.choice(found)
            content = other.read_bytes()
            other.write_bytes(path.read_bytes())
            path.write_bytes(content)
        case 2:
            path.write_bytes(r.choice(found).read_bytes() if r.random() < 0.7 else b"")
        case 3:
            path.unlink()
            path.mkdir()
        case 4:
            name = path.name
            path.rename(path.with_name(name + ".bak" if r.random() < 0.5 else "x-" + name))
        case _:
            path.write_bytes(damage_bytes(r, path.read_bytes()))


def forge_journal(r: random.Random, folder: Path) -> None:
    """Other lines in the journal of a checkpoint, with digests that are right."""
    path, journal = folder / "checkpoint.json", folder / "checkpoint.jsonl"
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()]  # few clients: not compressed
    for _ in range(r.choice((1, 1, 2, 4))):
        alter(r, lines)
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    body = json.loads(path.read_bytes())
    del body["sha256"]
    body["journal"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    journal.write_bytes(data)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, **body}))


def forge(r: random.Random, folder: Path) -> None:
    """Another content, with a digest that is right."""
    if (folder / "checkpoint.jsonl").exists() and r.random() < 0.5:
        forge_journal(r, folder)
        return
    path = r.choice([p for p in files(folder) if p.suffix in (".json", ".gz")])
    packed = path.suffix == ".gz"
    try:
        body = json.loads(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
    except ValueError:
        return
    if not isinstance(body, dict):
        return
    choice = r.random()
    if choice < 0.06:
        body[r.choice(sorted(body))] = nested(r.choice((500, 990, 100_000)))
    elif choice < 0.08 and not packed:
        shutil.copy(folder.parent / BOMB, path.with_suffix(".json.gz"))
        path.unlink()
        return
    else:
        for _ in range(r.choice((1, 1, 2, 4))):
            alter(r, body)
    if "sha256" in body and r.random() < 0.95:
        plain = {key: value for key, value in body.items() if key != "sha256"}
        with suppress(RecursionError):
            body["sha256"] = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    try:
        data = json.dumps(body).encode()
    except RecursionError:
        data = path.read_bytes().replace(b"{", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b",", 1)
    path.write_bytes(gzip.compress(data) if packed else data)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def alter(r: random.Random, body: Any) -> None:
    """One change somewhere in a JSON value."""
    place = body
    while True:
        keys: list[Any] = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        keys = [k for k in keys if k != "sha256"]
        if not keys:
            return
        key = r.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and r.random() < 0.7:
            place = place[key]
            continue
        match r.randrange(4):
            case 0:
                del place[key]
            case 1:
                place[key] = r.choice(VALUES)
            case 2:
                if isinstance(place, dict):
                    place[r.choice(("x", "", "round", "format", "tensors"))] = place[key]
                else:
                    place.append(place[key])
            case 3:
                other = r.choice(keys)
                place[key], place[other] = place[other], place[key]
        return


def case(r: random.Random, shared: Path, folder: Path) -> str:
    import fadamgc

    kind = r.choice(KINDS)
    os.environ["FADAMGC_CACHE"] = str(shared / "cache")
    place = folder / kind
    shutil.copytree(shared / kind, place)
    os.link(shared / BOMB, folder / BOMB)
    forged = r.random() < 0.4
    (forge if forged else damage)(r, place)
    after_two, after_four = np.load(shared / "x.npy")
    if os.environ.get("FUZZ_SHOW"):
        print(kind, "forged" if forged else "damaged", [str(p.relative_to(place)) for p in files(place)])
    if kind == "run":
        run = fadamgc.load_run(place)
        repr(run)
        run.rounds_to(0.5)
        run.save(folder / "again")
        if not forged and not np.array_equal(run.x.numpy(), after_two):
            raise Wrong("a damaged run was loaded with another model")
    elif kind == "experiment":
        options = r.choice((["report", str(place)], ["report", str(place), "--up-mbps", "3"]))
        if r.random() < 0.3:
            options = [
                "run",
                str(shared / "spec.toml"),
                "--out",
                str(place),
                "--resume",
                "--workers",
                "1",
                "--quiet",
            ]
        return "refused" if command(*options) else "accepted"
    else:
        run = fadamgc.simulate(
            fadamgc.FAdamGC(eta_l=0.01),
            task(),
            rounds=4,
            states=r.choice((kind, "auto")),
            checkpoint=place,
            resume=True,
            **SETTINGS,
        )
        if not forged and not np.array_equal(run.x.numpy(), after_four):
            raise Wrong("a damaged checkpoint was resumed to another model")
    return "accepted"


TARGET = Target("folders", prepare, case, limit=90)
