"""Reading the configuration: defaults, spellings, and the message of every refusal."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import yaml

from sgl_krul.config import (
    Config,
    LinkConfig,
    MemoryConfig,
    RedisConfig,
    SsdConfig,
    cache_home,
    load_config,
    parse_config,
    resolve_config,
    to_mapping,
)
from sgl_krul.errors import ConfigError, KrulError

CONFIGS = Path(__file__).parents[2] / "configs"
HOME = {"HOME": "/home/ada"}


def parse(mapping: dict[str, object]) -> Config:
    return parse_config(mapping, "krul.yaml", HOME)


def refusal(mapping: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(mapping)
    return str(caught.value)


def load_text(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "krul.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, HOME)


def file_refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    return str(caught.value).replace(str(tmp_path), "TMP")


def test_defaults() -> None:
    assert to_mapping(parse({})) == {
        "memory": {"capacity_bytes": 4 * 2**30, "prefault_bytes": 2**30},
        "ssd": {
            "path": "/home/ada/.cache/sgl-krul/sessions",
            "capacity_bytes": 64 * 2**30,
            "free_space_floor_bytes": 2 * 2**30,
            "fsync": "commit",
            "daily_write_bytes": 0,
        },
        "redis": None,
        "placement": {
            "replicate": "ssd",
            "memory_max_bytes": 0,
            "memory_age_s": 600.0,
            "demote_after_s": 0.0,
            "high_watermark": 0.9,
            "low_watermark": 0.8,
            "interval_s": 30.0,
        },
        "tenants": {"separator": "/", "quota_bytes": 0, "rules": []},
        "chunk": {"tokens": 256},
        "session": {
            "idle_pause_s": 0.0,
            "hold_deadline_s": 30.0,
            "busy_timeout_s": 30.0,
            "stale_ttl_s": 30 * 86400.0,
            "ttl_s": 0.0,
            "archive_key": None,
        },
        "restore": {
            "workers": 2,
            "max_layer_wait_s": 0.02,
            "strategy": "optimal",
            "recompute": True,
            "max_slice_tokens": 512,
            "max_step_s": 0.05,
            "staging_bytes": 64 * 2**20,
            "rates_file": None,
        },
        "pause": {"workers": 1},
        "estimator": {
            "enabled": False,
            "rows_per_1000": 8,
            "budget_bytes": 128 * 2**20,
            "windows": "relative",
            "gamma": 0.5,
        },
        "quality": {
            "level": "exact",
            "method": "auto",
            "share": 0.5,
            "gamma": 0.5,
            "sharing": "merged",
            "tokens": 2048,
            "deadline_s": 5.0,
            "queries_bytes": 256 << 20,
        },
        "link": None,
    }


def test_a_config_made_in_python_has_the_same_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert Config() == parse_config({}, "test")
    assert Config(ssd=None) == parse_config({"ssd": None}, "test")
    assert SsdConfig().path == Path("/scratch/sgl-krul/sessions")


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        parse({}).memory.capacity_bytes = 1  # type: ignore[misc]


def test_what_is_given_wins_and_the_rest_keeps_its_default() -> None:
    config = parse({"memory": {"capacity_bytes": "2GiB"}, "session": {"idle_pause_s": "10m"}, "ssd": None})
    assert config.memory == MemoryConfig(capacity_bytes=2 * 2**30)
    assert config.session.idle_pause_s == 600.0
    assert config.session.hold_deadline_s == 30.0
    assert config.ssd is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/var/cache/ada", **HOME}, "/var/cache/ada/sgl-krul"),
        ({"XDG_CACHE_HOME": "", **HOME}, "/home/ada/.cache/sgl-krul"),
        ({"XDG_CACHE_HOME": "relative", **HOME}, "/home/ada/.cache/sgl-krul"),
        (HOME, "/home/ada/.cache/sgl-krul"),
        ({}, str(Path.home() / ".cache/sgl-krul")),
    ],
)
def test_cache_home(environ: dict[str, str], expected: str) -> None:
    assert cache_home(environ) == Path(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("~", "/home/ada"),
        ("~/s", "/home/ada/s"),
        ("$DISK/s", "/mnt/a/s"),
        ("${DISK}s", "/mnt/as"),
        ("/a$$b", "/a$b"),
    ],
)
def test_paths_are_filled_in(text: str, expected: str) -> None:
    config = parse_config({"ssd": {"path": text}}, "krul.yaml", {**HOME, "DISK": "/mnt/a"})
    assert config.ssd is not None
    assert config.ssd.path == Path(expected)


PATH_ADVICE = (
    "expected an absolute path; a leading ~ and $VARIABLES are filled in. "
    "Correct it, or leave the key out for the default."
)
SIZE_ADVICE = (
    "expected a size of at least 1B, such as 512MiB, 8GiB or 10_000. "
    "Correct it, or leave the key out for the default."
)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("sessions", "not absolute"),
        ("", "not absolute"),
        ("~bob/s", "not absolute"),
        ("$DISK/s", "the environment variable DISK is not set"),
        ("/a/$", "Invalid placeholder in string: line 1, col 4"),
        ("/a\0b", "not a path"),
        (7, "not a path"),
        (None, "not a path"),
    ],
)
def test_paths_that_are_refused(value: object, why: str) -> None:
    expected = f"krul.yaml: ssd.path: {value!r} cannot be used ({why}): {PATH_ADVICE}"
    assert refusal({"ssd": {"path": value}}) == expected


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (0, "out of range"),
        (-1, "out of range"),
        (2**63, "out of range"),
        (10**30, "out of range"),
        ("0GiB", "out of range"),
        (1.5, "part of a byte"),
        (float("inf"), "part of a byte"),
        (float("nan"), "part of a byte"),
        ("1.5", "part of a byte"),
        (True, "not a size"),
        (None, "not a size"),
        ([1], "not a size"),
        ("", "not a size"),
        ("8 gib", "not a size"),
        ("8G", "not a size"),
        ("-8GiB", "not a size"),
        ("1e9", "not a size"),
        ("\u0663GiB", "not a size"),
        ("9" * 40, "not a size"),
    ],
)
def test_sizes_that_are_refused(value: object, why: str) -> None:
    expected = f"krul.yaml: memory.capacity_bytes: {value!r} cannot be used ({why}): {SIZE_ADVICE}"
    assert refusal({"memory": {"capacity_bytes": value}}) == expected


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (-1, "out of range"),
        (0, "out of range"),
        ("101d", None),
        ("40000d", "out of range"),
        (float("nan"), "not a finite number"),
        (float("inf"), "not a finite number"),
        (True, "not a duration"),
        (None, "not a duration"),
        ("", "not a duration"),
        ("30m1h", "not a duration"),
        ("1h1h", "not a duration"),
        ("10 minutes", "not a duration"),
        ("-1s", "not a duration"),
    ],
)
def test_durations_that_are_refused(value: object, why: str | None) -> None:
    mapping: dict[str, object] = {"session": {"hold_deadline_s": value}}
    if why is None:
        assert parse(mapping).session.hold_deadline_s == 101 * 86400.0
        return
    assert refusal(mapping) == (
        f"krul.yaml: session.hold_deadline_s: {value!r} cannot be used ({why}): expected a duration from 1ms "
        "to 36500d, such as 20ms, 1h30m or a number of seconds. "
        "Correct it, or leave the key out for the default."
    )


@pytest.mark.parametrize(
    ("section", "key", "value", "why", "expected"),
    [
        ("chunk", "tokens", 0, "out of range", "a multiple of 16 from 16 to 1048576"),
        ("chunk", "tokens", -16, "out of range", "a multiple of 16 from 16 to 1048576"),
        ("chunk", "tokens", 100, "not such a number", "a multiple of 16 from 16 to 1048576"),
        ("chunk", "tokens", "256", "not such a number", "a multiple of 16 from 16 to 1048576"),
        ("chunk", "tokens", 2**21, "out of range", "a multiple of 16 from 16 to 1048576"),
        ("restore", "workers", 0, "out of range", "a whole number from 1 to 64"),
        ("restore", "workers", True, "not such a number", "a whole number from 1 to 64"),
        ("restore", "workers", 2.0, "not such a number", "a whole number from 1 to 64"),
        ("pause", "workers", 65, "out of range", "a whole number from 1 to 64"),
        ("ssd", "fsync", "sometimes", "not one of them", "one of always, commit, never"),
        ("ssd", "fsync", False, "not one of them", "one of always, commit, never"),
        (
            "ssd",
            "free_space_floor_bytes",
            -1,
            "out of range",
            "a size of at least 0B, such as 512MiB, 8GiB or 10_000",
        ),
        (
            "ssd",
            "daily_write_bytes",
            -1,
            "out of range",
            "a size of at least 0B, such as 512MiB, 8GiB or 10_000",
        ),
        (
            "restore",
            "max_layer_wait_s",
            2,
            "out of range",
            "a duration from 0s to 1s, such as 20ms, 1h30m or a number of seconds",
        ),
        (
            "session",
            "idle_pause_s",
            -1,
            "out of range",
            "a duration from 0s to 36500d, such as 20ms, 1h30m or a number of seconds",
        ),
        (
            "session",
            "ttl_s",
            "-1d",
            "not a duration",
            "a duration from 0s to 36500d, such as 20ms, 1h30m or a number of seconds",
        ),
    ],
)
def test_values_that_are_refused(section: str, key: str, value: object, why: str, expected: str) -> None:
    assert refusal({section: {key: value}}) == (
        f"krul.yaml: {section}.{key}: {value!r} cannot be used ({why}): expected {expected}. "
        "Correct it, or leave the key out for the default."
    )


def test_a_refusal_is_a_krul_error_and_a_value_error() -> None:
    assert issubclass(ConfigError, KrulError)
    assert issubclass(ConfigError, ValueError)


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert len(refusal({"memory": {"capacity_bytes": "x" * 10_000}})) < 400


SECTIONS = (
    "Known here: memory, ssd, redis, placement, tenants, chunk, session, restore, pause, estimator, "
    "quality, link."
)
REDIS_KEYS = (
    "Known here: url, username, password, tls_ca_file, key_prefix, capacity_bytes, ttl_s, timeout_s, "
    "connect_timeout_s, connections, max_in_flight_bytes, lease_s."
)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"memroy": {}},
            f"memroy: unknown key. Did you mean memory? {SECTIONS}",
        ),
        ({"zzz": 1}, f"zzz: unknown key. {SECTIONS}"),
        ({1: 1}, f"1: unknown key. {SECTIONS}"),
        (
            {"memory": {"capacity": "2GiB"}},
            "memory.capacity: unknown key. Did you mean memory.capacity_bytes? "
            "Known here: capacity_bytes, prefault_bytes.",
        ),
        (
            {"restore": {"fsync": "never"}},
            "restore.fsync: unknown key. Did you mean ssd.fsync? Known here: workers, max_layer_wait_s, "
            "strategy, recompute, max_slice_tokens, max_step_s, staging_bytes, rates_file.",
        ),
        (
            {"workers": 2},
            f"workers: unknown key. Did you mean restore.workers or pause.workers? {SECTIONS}",
        ),
        (
            {"redis": {"url": "redis://h", "timeout": 1}},
            f"redis.timeout: unknown key. Did you mean redis.timeout_s? {REDIS_KEYS}",
        ),
        (
            {"session": {"lease_s": 1}},
            "session.lease_s: unknown key. Did you mean redis.lease_s? "
            "Known here: idle_pause_s, hold_deadline_s, busy_timeout_s, stale_ttl_s, ttl_s, archive_key.",
        ),
        (
            {"memory": {None: 1}},
            "memory.None: unknown key. Known here: capacity_bytes, prefault_bytes.",
        ),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_known_name(
    mapping: dict[str, object], message: str
) -> None:
    assert refusal(mapping) == f"krul.yaml: {message}"


@pytest.mark.parametrize("value", [4, "2GiB", [1], True])
def test_a_section_that_is_no_section_is_refused(value: object) -> None:
    assert refusal({"memory": value}) == (
        f"krul.yaml: memory: {value!r} cannot be used: expected a section with keys such as capacity_bytes. "
        "Leave memory out for the defaults."
    )


def test_ssd_switched_off_the_wrong_way_is_told_the_right_one() -> None:
    assert refusal({"ssd": False}) == (
        "krul.yaml: ssd: False cannot be used: expected a section with keys such as path, or null to do "
        "without ssd. Leave ssd out for the defaults."
    )


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load_text(tmp_path, "") == load_text(tmp_path, "# nothing\n") == parse({})


def test_a_section_whose_keys_are_all_commented_out_is_the_default(tmp_path: Path) -> None:
    assert load_text(tmp_path, "memory:\n  # capacity_bytes: 1GiB\nchunk:\n") == parse({})


def test_a_file_in_all_spellings(tmp_path: Path) -> None:
    text = "memory: {capacity_bytes: 10_000}\nssd: ~\nsession: {idle_pause_s: 1h30m, stale_ttl_s: 86400}\n"
    config = load_text(tmp_path, text)
    assert config.memory.capacity_bytes == 10_000
    assert config.ssd is None
    assert config.session.idle_pause_s == 5400.0
    assert config.session.stale_ttl_s == 86400.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "memory: {}\nchunk: {}\nmemory: {}\n",
            "TMP/krul.yaml: not YAML: the key 'memory' is given twice (line 3, column 1). Correct the file",
        ),
        (
            "memory:\n  capacity_bytes: 1GiB\n  capacity_bytes: 2GiB\n",
            "TMP/krul.yaml: not YAML: the key 'capacity_bytes' is given twice",
        ),
        ("memory: [\n", "TMP/krul.yaml: not YAML: while parsing a flow node"),
        ("memory: !!python/object/apply:os.getcwd []\n", "TMP/krul.yaml: not YAML: could not determine"),
        ("? [a]\n: b\n", "TMP/krul.yaml: not YAML: while constructing a mapping"),
        ("memory: {capacity_bytes: " + "9" * 5000 + "}", "TMP/krul.yaml: not YAML: Exceeds the limit"),
        ("[" * 5000, "TMP/krul.yaml: not YAML: maximum recursion depth"),
        ("- memory\n", "TMP/krul.yaml: list where a mapping is expected: sections such as 'memory:'"),
        ("on\n", "TMP/krul.yaml: bool where a mapping is expected: sections such as 'memory:'"),
        ("memroy: {}\n", "TMP/krul.yaml: memroy: unknown key. Did you mean memory?"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert file_refusal(tmp_path, text).startswith(message)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "krul.yaml"
    path.write_bytes(b"memory: \xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"krul\.yaml: not YAML: "):
        load_config(path, HOME)


@pytest.mark.parametrize(
    ("name", "why"), [("none.yaml", "No such file or directory"), (".", "Is a directory")]
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, why: str) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError) as caught:
        load_config(path, HOME)
    assert str(caught.value) == (
        f"{path}: the configuration file cannot be read: {why}. Expected a YAML file: "
        "check the path and its permissions."
    )


def written(tmp_path: Path, name: str, tokens: int) -> Path:
    path = tmp_path / name
    path.write_text(f"chunk: {{tokens: {tokens}}}\n", encoding="utf-8")
    return path


def test_the_environment_wins_over_the_flag_and_the_flag_over_the_default(tmp_path: Path) -> None:
    variable, flag = written(tmp_path, "variable.yaml", 16), written(tmp_path, "flag.yaml", 32)
    flag_json = json.dumps({"config_file": str(flag)})
    with_variable = {**HOME, "KRUL_CONFIG": str(variable)}
    assert resolve_config(flag_json, with_variable).chunk.tokens == 16
    assert resolve_config(None, with_variable).chunk.tokens == 16
    assert resolve_config(flag_json, HOME).chunk.tokens == 32
    assert resolve_config(flag_json, {**HOME, "KRUL_CONFIG": ""}).chunk.tokens == 32
    for nothing in (None, "", "{}"):
        assert resolve_config(nothing, HOME) == parse({})


def test_a_home_directory_in_the_file_name_is_filled_in(tmp_path: Path) -> None:
    written(tmp_path, "krul.yaml", 48)
    environ = {"HOME": str(tmp_path)}
    assert resolve_config('{"config_file": "~/krul.yaml"}', environ).chunk.tokens == 48
    assert resolve_config(None, {**environ, "KRUL_CONFIG": "~/krul.yaml"}).chunk.tokens == 48


FLAG = "--unified-cache-external-linker-config"


@pytest.mark.parametrize(
    ("flag_json", "message"),
    [
        ("{config_file: x}", f"{FLAG}: '{{config_file: x}}' is not JSON (Expecting property name"),
        ("[" * 100_000, f"{FLAG}: '[[["),
        ("[]", f'{FLAG}: [] cannot be used: expected JSON such as \'{{"config_file": '),
        (
            '{"configfile": "x"}',
            f"{FLAG}: configfile: unknown key. Did you mean config_file? Known here: config_file.",
        ),
        (
            '{"config_file": 3}',
            f"{FLAG}: config_file: 3 cannot be used: expected the path of a YAML file. "
            "Leave it out for the built-in default.",
        ),
        ('{"config_file": ""}', f"{FLAG}: config_file: '' cannot be used: expected the path of a YAML file."),
        ('{"config_file": "/no/such.yaml"}', "/no/such.yaml: the configuration file cannot be read: No such"),
    ],
)
def test_flags_that_are_refused(flag_json: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(flag_json, HOME)
    assert str(caught.value).startswith(message)


def test_a_wrong_flag_is_refused_even_where_the_environment_wins(tmp_path: Path) -> None:
    environ = {**HOME, "KRUL_CONFIG": str(written(tmp_path, "krul.yaml", 16))}
    with pytest.raises(ConfigError, match="is not JSON"):
        resolve_config("nonsense", environ)


def test_a_missing_file_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^/no/such\.yaml: the configuration file cannot be read"):
        resolve_config(None, {**HOME, "KRUL_CONFIG": "/no/such.yaml"})


def dotted_keys(mapping: dict[str, object]) -> set[str]:
    sections = {name: keys for name, keys in mapping.items() if isinstance(keys, dict)}
    return {f"{name}.{key}" for name, keys in sections.items() for key in keys}


def uncommented(text: str) -> str:
    """The file with its shown defaults ('#key: value') and sections that are off ('#redis:') as given."""
    return re.sub(r"(?m)^( *)#(?=[a-z_0-9]+:)", r"\1", text)


def test_the_cpu_config_loads_and_suits_a_laptop() -> None:
    config = load_config(CONFIGS / "cpu.yaml", HOME)
    assert config.memory.capacity_bytes == 2 * 2**30
    assert config.ssd is not None
    assert config.ssd.path == Path("/home/ada/.cache/sgl-krul/sessions")
    assert config.redis is None
    assert config.link is None


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_all_our_configs_load(path: Path) -> None:
    load_config(path, {**HOME, "KRUL_PORT": "30000", "KRUL_REDIS_PASSWORD": "s3cret"})


def test_the_ssd_config_loads() -> None:
    config = load_config(CONFIGS / "ssd.yaml", HOME)
    assert config.ssd is not None
    assert config.ssd.path == Path("/var/lib/sgl-krul/sessions")
    assert config.memory.capacity_bytes == 64 * 2**30
    assert config.session.idle_pause_s == 600.0


def test_the_cpu_config_shows_every_key_and_its_true_default(tmp_path: Path) -> None:
    text = uncommented((CONFIGS / "cpu.yaml").read_text(encoding="utf-8"))
    full = load_text(tmp_path, text)
    assert full.redis == RedisConfig(url="redis://127.0.0.1:6379/0"), "a shown default is not the default"
    as_it_is = load_config(CONFIGS / "cpu.yaml", HOME)
    assert full.link == LinkConfig(bytes_per_s=18_000_000), "a shown default is not the default"
    assert replace(full, redis=None, link=None) == as_it_is, "a shown default is not the default"
    assert dotted_keys(yaml.safe_load(text)) == dotted_keys(to_mapping(full))


def test_the_cpu_config_says_something_about_every_key() -> None:
    lines = (CONFIGS / "cpu.yaml").read_text(encoding="utf-8").splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r" +#?[a-z_0-9]+: ", line)]
    bare = [lines[number] for number in keys if not re.match(r" +# ", lines[number - 1])]
    assert bare == []
