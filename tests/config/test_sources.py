from pathlib import Path

import pytest

from rekindle.config.choices import FlashAttn, KvType, LogLevel, WritePolicy
from rekindle.config.declare import Bytes
from rekindle.config.settings import SECTIONS, Settings, all_settings
from rekindle.config.sources import (
    api_keys,
    read_file,
    resolve,
)
from rekindle.errors import StartupError


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default() -> None:
    file = {"engine": {"ctx_size": 1, "parallel": 2, "batch_size": 30, "ubatch_size": 30}}
    environment = {"REKINDLE_CTX_SIZE": "10", "REKINDLE_PARALLEL": "20"}

    resolved = resolve({"ctx_size": "100"}, environment, file)

    engine = resolved.settings.engine
    assert (engine.ctx_size, engine.parallel, engine.batch_size) == (100, 20, 30)
    assert engine.queue_size == Settings().engine.queue_size
    assert [
        resolved.sources[name] for name in ("ctx_size", "parallel", "batch_size", "queue_size")
    ] == [
        "--ctx-size",
        "REKINDLE_PARALLEL",
        "engine.batch_size in the configuration file",
        "default",
    ]


def test_nothing_given_is_the_documented_defaults() -> None:
    resolved = resolve({}, {}, {})
    assert resolved.settings == Settings()
    assert set(resolved.sources.values()) == {"default"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("gpu_layers", "-1", -1),
        ("threads", " 8 ", 8),
        ("flash_attn", "ON", FlashAttn.ON),
        ("cache_type_k", "q8_0", KvType.Q8_0),
        ("swa_full", "true", True),
        ("swa_full", "0", False),
        ("log_level", "debug", LogLevel.DEBUG),
        ("shutdown_grace", "2.5", 2.5),
        ("ping_interval", "3", 3.0),
        ("api_key", "one, two", ("one", "two")),
        ("api_key_file", "/etc/keys", Path("/etc/keys")),
        ("body_limit", "1048576", Bytes(1048576)),
        ("body_limit", "32MiB", Bytes(32 * 1024**2)),
        ("body_limit", "4 MB", Bytes(4_000_000)),
        ("body_limit", "1gib", Bytes(1024**3)),
        ("cache_disk", "2TB", Bytes(2 * 10**12)),
        ("cache_disk", "1 TiB", Bytes(1024**4)),
        ("cache_disk", "0", Bytes(0)),
        ("cache_ram", "8GiB", Bytes(8 * 1024**3)),
        ("cache_dir", "/var/cache/kv", Path("/var/cache/kv")),
        ("cache_prompt", "off", False),
        ("cache_write_policy", "Reused", WritePolicy.REUSED),
    ],
)
def test_text_becomes_the_type_of_the_field(name: str, text: str, value: object) -> None:
    settings = resolve({}, {f"REKINDLE_{name.upper()}": text}, {}).settings
    section = next(each.section for each in all_settings() if each.name == name)
    found = getattr(getattr(settings, section), name)
    assert (found, type(found)) == (value, type(value))


def test_without_a_size_the_memory_tier_is_left_to_the_machine() -> None:
    assert resolve({}, {}, {}).settings.cache.cache_ram is None
    assert resolve({"cache_ram": "0"}, {}, {}).settings.cache.cache_ram == 0


def test_a_comma_separates_keys_but_not_patterns() -> None:
    settings = resolve({"api_key": ["a,b", "c"], "volatile": ["a{1,2}"]}, {}, {}).settings
    assert settings.server.api_key == ("a", "b", "c")
    assert settings.chat.volatile == ("a{1,2}",)


@pytest.mark.parametrize(
    ("flags", "environment", "file", "sentence"),
    [
        (
            {"port": "70000"},
            {},
            {},
            "port must be a whole number from 1 to 65535, but --port is '70000'.",
        ),
        (
            {},
            {"REKINDLE_PARALLEL": "many"},
            {},
            "parallel must be a whole number from 1 to 64, but REKINDLE_PARALLEL is 'many'.",
        ),
        (
            {},
            {},
            {"engine": {"parallel": "4"}},
            "parallel must be a whole number from 1 to 64,"
            " but engine.parallel in the configuration file is '4'.",
        ),
        (
            {},
            {},
            {"engine": {"parallel": True}},
            "parallel must be a whole number from 1 to 64,"
            " but engine.parallel in the configuration file is True.",
        ),
        (
            {},
            {"REKINDLE_FLASH_ATTN": "maybe"},
            {},
            "flash_attn must be one of auto, on, off, but REKINDLE_FLASH_ATTN is 'maybe'.",
        ),
        (
            {},
            {},
            {"server": {"cors": "https://a.example"}},
            "cors must be a list of strings, none of them empty,"
            " but server.cors in the configuration file is 'https://a.example'.",
        ),
        (
            {},
            {"REKINDLE_PING_INTERVAL": "nan"},
            {},
            "ping_interval must be a number from 0.1 to 86400,"
            " but REKINDLE_PING_INTERVAL is 'nan'.",
        ),
        (
            {"body_limit": "many"},
            {},
            {},
            "body_limit must be a size such as 1048576, 4MB or 1GiB,"
            " from 1024 to 1099511627776 bytes, but --body-limit is 'many'.",
        ),
        (
            {},
            {},
            {"cache": {"cache_disk": "2PB"}},
            "cache_disk must be a size such as 1048576, 4MB or 1GiB, from 0 to 1125899906842624"
            " bytes, but cache.cache_disk in the configuration file is '2PB'.",
        ),
        (
            {"cache_write_policy": "none"},
            {},
            {},
            "cache_write_policy must be one of all, reused, but --cache-write-policy is 'none'.",
        ),
        (
            {"model": ""},
            {},
            {},
            "model must be a string that is not empty, but MODEL is ''.",
        ),
        (
            {"parallel": "8"},
            {},
            {"engine": {"batch_size": 4, "ubatch_size": 4}},
            "parallel must not exceed batch_size, but it is 8 (--parallel) and batch_size is 4"
            " (engine.batch_size in the configuration file).",
        ),
        (
            {"ubatch_size": "1024"},
            {},
            {"engine": {"batch_size": 512}},
            "ubatch_size must not exceed batch_size, but it is 1024 (--ubatch-size) and"
            " batch_size is 512 (engine.batch_size in the configuration file).",
        ),
        (
            {"cache_type_v": "q8_0", "flash_attn": "off"},
            {},
            {},
            "cache_type_v q8_0 (--cache-type-v) needs flash attention,"
            " but flash_attn is off (--flash-attn).",
        ),
        (
            {},
            {},
            {"engine": {"ctx-size": 1}},
            "The configuration file has an unknown key engine.ctx-size; did you mean ctx_size?",
        ),
        (
            {},
            {},
            {"sever": {}},
            "The configuration file has an unknown section [sever]; did you mean server?",
        ),
        (
            {},
            {},
            {"zzz": {}},
            "The configuration file has an unknown section [zzz]; it can be model, chat, sampling,"
            " engine, placement, cache, server, models.",
        ),
        (
            {},
            {},
            {"model": "a.gguf"},
            "model in the configuration file must be a section, written [model].",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence_naming_it_its_place_and_what_is_allowed(
    flags: dict[str, object],
    environment: dict[str, str],
    file: dict[str, object],
    sentence: str,
) -> None:
    with pytest.raises(StartupError) as caught:
        resolve(flags, environment, file)
    assert caught.value.message == sentence


@pytest.mark.parametrize("text", ["", "secret,,other", " "])
def test_an_empty_api_key_is_refused_without_showing_the_others(text: str) -> None:
    with pytest.raises(StartupError, match="REKINDLE_API_KEY") as caught:
        resolve({}, {"REKINDLE_API_KEY": text}, {})
    assert "secret" not in caught.value.message


def test_keys_come_from_the_setting_and_from_the_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# team\nalpha\n\n  beta  \n")
    server = resolve({"api_key": ["direct"], "api_key_file": str(path)}, {}, {}).settings.server
    assert api_keys(server) == ("direct", "alpha", "beta")


@pytest.mark.parametrize("content", [None, b"# only a comment\n", b"\xff\xfe"])
def test_a_key_file_that_gives_no_key_stops_the_start(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    server = resolve({"api_key_file": str(path)}, {}, {}).settings.server
    with pytest.raises(StartupError, match=str(path)):
        api_keys(server)


@pytest.mark.parametrize("content", [None, b"[engine\n", b"\xff"])
def test_an_unreadable_configuration_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "rekindle.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match=str(path)):
        read_file(path)


def test_every_default_is_allowed_and_survives_being_written_in_the_file() -> None:
    file: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    for setting in all_settings():
        value = getattr(setting.default, "value", setting.default)
        if value is not None:
            is_size = setting.about.unit > 1  # a plain number counts another unit
            file[setting.section][setting.name] = f"{value}B" if is_size else value
    assert resolve({}, {}, file).settings == Settings()


def test_no_two_settings_share_a_name() -> None:
    names = [setting.name for setting in all_settings()]
    assert len(names) == len(set(names))


def test_values_of_one_model_replace_the_general_ones_and_flags() -> None:
    file = {
        "engine": {"parallel": 3},
        "models": {"big": {"ctx_size": 8192, "temperature": 0.1}, "small": {"parallel": 1}},
    }
    resolved = resolve({"ctx_size": "100"}, {"REKINDLE_TOP_K": "7"}, file)
    settings = resolved.settings
    big, small, other = settings.of("big"), settings.of("small"), settings.of("other")
    assert [each.engine.ctx_size for each in (big, small, other)] == [8192, 100, 100]
    assert [each.engine.parallel for each in (big, small, other)] == [3, 1, 3]
    assert [each.sampling.temperature for each in (big, small, other)] == [0.1, None, None]
    assert [each.sampling.top_k for each in (big, small, other)] == [7, 7, 7]
    assert resolved.by_model == {
        "big": {
            "ctx_size": 'models."big".ctx_size in the configuration file',
            "temperature": 'models."big".temperature in the configuration file',
        },
        "small": {"parallel": 'models."small".parallel in the configuration file'},
    }


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        (
            {"a": {"xyz": 1}},
            'The configuration file has an unknown key models."a".xyz; it can be chat_template,',
        ),
        (
            {"a": {"ctx-size": 1}},
            'The configuration file has an unknown key models."a".ctx-size; did you mean ctx_size?',
        ),
        (
            {"a": {"port": 1}},
            'models."a".port in the configuration file cannot be set for one model: write it under'
            " [server].",
        ),
        (
            {"a": {"models_dir": "x"}},
            'models."a".models_dir in the configuration file cannot be set for one model: write it'
            " under [model].",
        ),
        (
            {"a": {"parallel": "many"}},
            "parallel must be a whole number from 1 to 64, but"
            " models.\"a\".parallel in the configuration file is 'many'.",
        ),
        (
            {"a": {"batch_size": 2}},
            "parallel must not exceed batch_size, but it is 4 (default) and batch_size is 2"
            ' (models."a".batch_size in the configuration file).',
        ),
        (
            ["a"],
            'models in the configuration file must be sections, written [models."name"].',
        ),
    ],
)
def test_a_wrong_section_of_a_model_is_told(models: object, sentence: str) -> None:
    with pytest.raises(StartupError) as caught:
        resolve({}, {}, {"models": models})
    assert caught.value.message.startswith(sentence)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("cache_ram", "512", 512 * 2**20),
        ("cache_ram", "512MB", 512 * 10**6),
        ("cache_ram", "0", 0),
        ("cache_disk", "2097152", 2 * 2**20),
        ("gpu_layers", "all", -1),
        ("gpu_layers", "auto", -1),
        ("threads", "-1", None),
        ("parallel", "-1", 4),
        ("flash_attn", "1", FlashAttn.ON),
        ("flash_attn", "disabled", FlashAttn.OFF),
        ("log_level", "2", LogLevel.WARNING),
        ("keep_alive", "-1", 0.0),
        ("top_k", "-1", 0),
        ("swa_full", "enabled", True),
    ],
)
def test_llama_servers_units_and_words_are_understood(name: str, text: str, value: object) -> None:
    settings = resolve({name: text}, {}, {}).settings
    section = next(each.section for each in all_settings() if each.name == name)
    assert getattr(getattr(settings, section), name) == value


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"cache_ram": "-1"}, "cache_ram must be a size such as 512 (MiB), 4MB or 1GiB, from 0 to"),
        ({"cache_ram": "8589934592"}, "cache_ram must be a size such as 512 (MiB)"),
        ({"alias": "a,b"}, "alias must be one name, but --alias is 'a,b'."),
        (
            {"chat_template_kwargs": "[1]"},
            "chat_template_kwargs must be a JSON object, but --chat-template-kwargs is '[1]'.",
        ),
    ],
)
def test_values_that_llama_server_would_take_are_refused_with_a_sentence(
    flags: dict[str, object], sentence: str
) -> None:
    with pytest.raises(StartupError) as caught:
        resolve(flags, {}, {})
    assert caught.value.message.startswith(sentence)
