"""Codecs of one vector: sizes, what comes back, and what is refused."""

from __future__ import annotations

import sys

import pytest
import torch

from fadamgc.codecs import CODECS, check_table, codec_table, codecs_of, make_codec
from fadamgc.errors import InputError

NAMES = ("float32", "bfloat16", "int8", "int8:3", "int4", "int4:5", "topk:0.1", "topk:1", "means", "means:7")
LENGTHS = (1, 2, 3, 5, 63, 64, 65, 255, 256, 257, 1000)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def vector(n, seed=0, scale=1.0):
    return scale * torch.randn(n, generator=generator(seed))


def there_and_back(name, x, seed=0):
    codec = make_codec(name)
    data = codec.encode(x, generator(seed))
    codec.check(data, len(x))
    return codec.decode(data, len(x))


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_of_n_numbers_has_size_n_bytes_and_comes_back_with_its_length(name):
    codec = make_codec(name)
    for n in LENGTHS:
        data = codec.encode(vector(n), generator())
        assert data.dtype == torch.uint8
        assert data.shape == (codec.size(n),)
        back = codec.decode(data, n)
        assert back.dtype == torch.float32
        assert back.shape == (n,)
        assert torch.isfinite(back).all()


def test_the_sizes_are_those_of_the_documentation():
    sizes = {name: make_codec(name).size(1001) for name in NAMES}
    assert sizes == {
        "float32": 4004, "bfloat16": 2002, "int8": 1001 + 4 * 4, "int8:3": 1001 + 4 * 334,
        "int4": 501 + 4 * 16, "int4:5": 501 + 4 * 201, "topk:0.1": 8 * 101, "topk:1": 8 * 1001,
        "means": 4 * 16, "means:7": 4 * 143,
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 65, 256])
def test_zero_stays_zero(name, n):
    assert not there_and_back(name, torch.zeros(n)).any()
    x = vector(n)
    x[: n // 2] = 0
    if not name.startswith("means"):
        assert not there_and_back(name, x)[: n // 2].any()


@pytest.mark.parametrize("name", ["float32", "topk:1", "means:1"])
@pytest.mark.parametrize("n", LENGTHS)
def test_nothing_is_lost_where_every_number_is_sent(name, n):
    assert torch.equal(there_and_back(name, vector(n)), vector(n))


@pytest.mark.parametrize(("name", "levels", "block"), [("int8:16", 127, 16), ("int4:16", 7, 16)])
def test_random_rounding_is_within_a_level_of_its_block_and_right_on_average(name, levels, block):
    x = vector(50)
    rows = torch.nn.functional.pad(x, (0, 14)).view(-1, block)
    level = (rows.abs().amax(dim=1, keepdim=True) / levels).expand_as(rows).reshape(-1)[:50]
    backs = torch.stack([there_and_back(name, x, seed) for seed in range(1000)])
    assert ((backs - x).abs() <= 1.001 * level).all()
    # The deviation of one rounding is at most half a level; 6 of those of the mean of 1000.
    assert ((backs.mean(0) - x).abs() <= 6 * 0.5 * level / 1000**0.5 + 1e-6).all()
    assert len(torch.unique(backs[:, 1])) == 2


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_random_rounding_repeats_with_its_seed(name):
    one, same, other = (make_codec(name).encode(vector(300), generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_largest_numbers_are_sent_with_their_positions():
    x = torch.tensor([0.1, -3.0, 0.2, 2.0, -0.3])
    assert torch.equal(there_and_back("topk:0.4", x), torch.tensor([0.0, -3.0, 0.0, 2.0, 0.0]))
    assert torch.equal(there_and_back("topk:0.01", x), torch.tensor([0.0, -3.0, 0.0, 0.0, 0.0]))


def test_means_are_those_of_the_blocks_and_the_last_one_may_be_shorter():
    x = torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0])
    assert torch.equal(there_and_back("means:2", x), torch.tensor([2.0, 2.0, 6.0, 6.0, 9.0]))


def test_bfloat16_rounds_to_the_nearest():
    x = vector(100)
    assert torch.equal(there_and_back("bfloat16", x), x.to(torch.bfloat16).float())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_does_not_become_finite(name, value):
    x = vector(200)
    x[77] = value
    assert not torch.isfinite(there_and_back(name, x)).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_numbers_of_any_size_can_be_rounded(name):
    for scale in (1e-44, 1e-30, 1e30):
        assert torch.isfinite(there_and_back(name, vector(100, scale=scale))).all()


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_do_not_fit_are_refused(name):
    codec = make_codec(name)
    data = codec.encode(vector(10), generator())
    for wrong in (data[:-1], torch.cat([data, data[:1]]), data.float(), data[None]):
        with pytest.raises(InputError, match=rf"10 numbers as {codec} are {codec.size(10)} bytes; got"):
            codec.check(wrong, 10)


@pytest.mark.parametrize("positions", [[-1, 3], [3, 10], [3, 3], [4, 3]])
def test_positions_that_do_not_ascend_are_refused(positions):
    codec = make_codec("topk:0.2")
    data = codec.encode(vector(10), generator())
    data[:8] = torch.tensor(positions, dtype=torch.int32).view(torch.uint8)
    with pytest.raises(InputError, match="positions of the numbers do not ascend from 0 to at most 9"):
        codec.decode(data, 10)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_same_on_machines_of_both_byte_orders(name, monkeypatch):
    x, codec = vector(20), make_codec(name)
    data, back = codec.encode(x, generator()), there_and_back(name, x)
    monkeypatch.setattr(sys, "byteorder", "big")  # as if this machine stored numbers the other way round
    assert torch.equal(there_and_back(name, x), back)
    if name == "float32":
        assert torch.equal(codec.encode(x, generator()), data.view(-1, 4).flip(1).reshape(-1))


# Names and tables.


def test_names_are_those_of_the_table_and_give_the_same_codec_again():
    for name in (*CODECS, *NAMES):
        codec = make_codec(name)
        assert make_codec(str(codec)) == codec
    assert str(make_codec("topk:0.5")) == "topk:0.5"
    assert str(make_codec("int8:256")) == "int8"


@pytest.mark.parametrize(
    "name",
    [
        *("int9", "", "int8:0", "int8:-1", "int8:x", "int8:1.5", "int8:99999999", "int8:" + "9" * 5000),
        *("topk:0", "topk:1.1", "topk:nan", "topk:x", "float32:2", "INT8", " int8", 8, None, ["int8"]),
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(InputError, match="codec for y=.* is not accepted"):
        codec_table({"y": name})


def test_tables_are_dicts_pairs_or_texts():
    expected = (("correction.dy", "int8"), ("dx", "topk:0.01"))
    for table in (
        {"dx": "topk", "correction.dy": "int8"},
        {"dx": "topk", "correction": {"dy": "int8"}},
        [("dx", "topk"), ("correction.dy", "int8")],
        expected,
        "dx=topk,correction.dy=int8",
        " dx = topk , correction.dy=int8, ",
    ):
        assert codec_table(table) == expected
    assert codec_table({}) == codec_table("") == ()


@pytest.mark.parametrize("table", [3, "dy", "dy=int8=int4", [("dy",)], [3], object()])
def test_other_tables_are_refused(table):
    with pytest.raises(InputError, match="codec=.* is not accepted; it must be a dict of fields and codecs"):
        codec_table(table)


def test_a_field_has_one_codec():
    with pytest.raises(InputError, match="codec for dy is given twice, as 'int8' and 'int4'"):
        codec_table("dy=int8,dy=int4")
    fields = ("x", "correction.y", "correction.dy")
    assert set(codecs_of((("dy", "int8"),), fields)) == {"correction.dy"}
    check_table((("dy", "int8"), ("y", "int4")), fields, "FAdamGC")
    with pytest.raises(InputError, match=r"'correction\.dy' and 'dy': both are correction\.dy"):
        check_table((("correction.dy", "int8"), ("dy", "int4")), fields, "FAdamGC")
    with pytest.raises(InputError, match=r"codec for 'dz': no message of FAdamGC has this field.*it has x, "):
        check_table((("dz", "int8"),), fields, "FAdamGC")
