"""The book of rates: what it keeps, what it refuses to believe, and threads that write it at once."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sgl_krul.restore.cost import DEFAULT_LAND_S_PER_BYTE, ForwardSample, LandSample, LoadSample, Rates
from sgl_krul.restore.rate_book import RateBook, machine_fingerprint
from tests.unit.test_cost import COMPUTE, LINK, requests, slices

HERE = machine_fingerprint(cpu_model="a cpu", cores=2, namespace="n")
NOTHING = Rates(None, {}, DEFAULT_LAND_S_PER_BYTE)


def filled(path: Path | None) -> RateBook:
    book = RateBook(path, HERE)
    book.observe_compute(slices(COMPUTE))
    book.observe_load(requests(LINK))
    book.observe_land([LandSample(1_000_000, 0.002)])
    book.observe_forward([ForwardSample(0, 16, 30, 1.0)])
    assert book.check() == []
    return book


def test_without_a_file_nothing_is_known(tmp_path: Path) -> None:
    assert RateBook(tmp_path / "rates.json", HERE).rates() == NOTHING
    assert RateBook(None, HERE).rates() == NOTHING


def test_what_was_measured_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rates.json"
    rates = filled(path).rates()
    assert rates.compute is not None
    assert rates.tiers["redis"].in_flight == 4
    assert rates.land_s_per_byte == 2e-9
    assert 0 < rates.request_s < 1
    again = RateBook(path, HERE)
    assert again.rates() == rates
    assert again.check() == []
    assert [entry.name for entry in path.parent.iterdir()] == ["rates.json"]


def test_it_works_without_a_file() -> None:
    assert filled(None).rates().compute is not None


def test_rates_of_another_machine_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path / "rates.json")
    with caplog.at_level(logging.INFO):
        other = RateBook(tmp_path / "rates.json", machine_fingerprint(cpu_model="another", cores=2))
    assert other.rates() == NOTHING
    assert "of another machine, model or setting: not used" in caplog.text


def edited(path: Path, **changes: object) -> str:
    return json.dumps({**json.loads(path.read_text()), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"compute": 3},
        {"compute": {"kv_s_per_token": 1.0}},
        {"compute": {"kv_s_per_token": True, "rest_s_per_token": 1, "attention_s_per_pair": 1, "slice_s": 1}},
        {"compute": {"kv_s_per_token": -1, "rest_s_per_token": 1, "attention_s_per_pair": 1, "slice_s": 1}},
        {"tiers": []},
        {"tiers": {"ssd": {"latency_s": 0, "bytes_per_s": 0, "in_flight": 1}}},
        {"tiers": {"ssd": {"latency_s": 0, "bytes_per_s": 1, "in_flight": float("inf")}}},
        {"tiers": {"ssd": {"latency_s": 0, "bytes_per_s": 10**400, "in_flight": 1}}},
        {"land_s_per_byte": "fast"},
        {"request_s": -1},
    ],
)
def test_a_file_that_lies_is_no_data_and_a_line_in_the_log(
    changes: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rates.json"
    filled(path)
    path.write_text(edited(path, **changes))
    with caplog.at_level(logging.WARNING):
        book = RateBook(path, HERE)
    assert book.rates() == NOTHING
    assert "calibrate again" in caplog.text
    book.observe_compute(slices(COMPUTE))
    assert RateBook(path, HERE).rates().compute is not None


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b" " * (1 << 21)])
def test_a_file_that_is_none_is_no_data(raw: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rates.json"
    path.write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        assert RateBook(path, HERE).rates() == NOTHING
    assert str(path) in caplog.text


def test_a_directory_in_its_place_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rates.json"
    path.mkdir()
    book = RateBook(path, HERE)
    book.observe_compute(slices(COMPUTE))
    assert book.rates().compute is not None
    assert "rates could not be kept" in caplog.text
    assert list(tmp_path.iterdir()) == [path]


def test_slices_that_tell_nothing_apart_are_told(caplog: pytest.LogCaptureFixture) -> None:
    book = RateBook(None, HERE)
    with caplog.at_level(logging.INFO):
        book.observe_compute([sample for sample in slices(COMPUTE) if sample.kv_only])
    assert book.rates() == NOTHING
    assert "calibrate first" in caplog.text
    book.observe_forward([ForwardSample(0, 16, 30, 1.0)])
    assert book.rates() == NOTHING


def test_refreshing_one_tier_leaves_the_others(tmp_path: Path) -> None:
    book = filled(tmp_path / "rates.json")
    before = book.rates()
    book.observe_load([LoadSample("ssd", size, size / 1e8, 1) for size in (100_000, 1_000_000, 5_000_000)])
    after = book.rates()
    assert after.tiers["redis"] == before.tiers["redis"]
    assert after.tiers["ssd"].bytes_per_s == pytest.approx(1e8)
    assert after.compute == before.compute


def test_nothing_new_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    book = filled(path)
    path.unlink()
    book.observe_compute([])
    book.observe_load([])
    book.observe_land([])
    book.observe_forward([])
    assert not path.exists()


def test_forget_begins_anew(tmp_path: Path) -> None:
    book = filled(tmp_path / "rates.json")
    before = book.rates()
    book.forget({"ssd"})
    assert "ssd" not in book.rates().tiers
    assert book.rates().compute == before.compute
    book.forget(before.tiers, compute=True)
    assert book.rates().compute is None
    assert not book.rates().tiers
    assert RateBook(tmp_path / "rates.json", HERE).rates() == book.rates()


def test_a_rate_that_no_machine_has_is_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    filled(path)
    content = json.loads(path.read_text())
    next(iter(content["tiers"].values()))["bytes_per_s"] = 1e300
    path.write_text(json.dumps(content))
    assert RateBook(path, HERE).rates() == NOTHING


def test_threads_lose_no_tier_and_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    book = RateBook(path, HERE)

    def observe(number: int) -> None:
        book.observe_load([LoadSample(f"t{number}", size, size / 1e7, 1) for size in (1000, 5000, 9000)])
        assert book.rates().tiers[f"t{number}"].in_flight == 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(observe, range(24)))
    assert set(book.rates().tiers) == {f"t{number}" for number in range(24)}
    assert RateBook(path, HERE).rates() == book.rates()
    assert book.check() == []


def test_check_finds_leftovers_and_foreign_content(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    book = filled(path)
    (tmp_path / ".rates.json-abc.tmp").touch()
    path.write_text(edited(path, request_s=7.0))
    problems = book.check()
    assert "was left behind by a write" in problems[0]
    assert "does not hold what is known" in problems[1]


def test_a_fingerprint_is_of_all_facts_and_of_no_order() -> None:
    one = machine_fingerprint(cpu_model="x", cores=2)
    assert one == machine_fingerprint(cores="2", cpu_model="x")
    assert len({one, machine_fingerprint(cpu_model="x", cores=4), machine_fingerprint(cpu_model="x")}) == 3
    assert len(one) == 32
    with pytest.raises(ValueError, match=r"no facts: expected what rates depend on, such as cpu_model"):
        machine_fingerprint()
