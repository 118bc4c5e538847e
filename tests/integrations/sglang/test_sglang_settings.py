"""An operator's settings of the backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.errors import InvalidField
from kvferry.integrations.sglang.settings import Settings

ADDRESS = {"KVFERRY_ADDRESS": "unix:/run/kvferry/node.sock"}


def test_settings_read_every_variable() -> None:
    found = Settings.of(
        {
            **ADDRESS,
            "KVFERRY_ENGINE_ID": "prefill-0",
            "KVFERRY_ALLOWED_HOMES": "10.0.0.*:7300, 10.0.1.1:7300",
            "KVFERRY_DIRECTORY": "file:///homes.json",
            "KVFERRY_READ_TIMEOUT": "30",
            "KVFERRY_START_TIMEOUT": "5",
            "KVFERRY_LAYER_NAMES": "layers.{}",
            "KVFERRY_PROMPT_CHECK": "require",
            "KVFERRY_PREFIX_SHARE": "0",
            "KVFERRY_PREFIX_WAIT": "2",
            "KVFERRY_TLS_CA": "/ca.pem",
        }
    )
    assert found.engine_id == "prefill-0"
    assert found.allowed_homes == "10.0.0.*:7300, 10.0.1.1:7300"
    assert (found.directory, found.read_timeout, found.start_timeout) == ("file:///homes.json", 30.0, 5.0)
    assert found.layer_names.format(3) == "layers.3"
    assert found.prompt_check == "require"
    assert (found.prefix_share, found.prefix_wait) == (0.0, 2.0)
    assert found.tls_ca == Path("/ca.pem")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("KVFERRY_ADDRESS", ""),
        ("KVFERRY_READ_TIMEOUT", "soon"),
        ("KVFERRY_READ_TIMEOUT", "0"),
        ("KVFERRY_START_TIMEOUT", "inf"),
        ("KVFERRY_LAYER_NAMES", "layers"),
        ("KVFERRY_PROMPT_CHECK", "on"),
        ("KVFERRY_PREFIX_SHARE", "1.1"),
        ("KVFERRY_PREFIX_SHARE", "all"),
        ("KVFERRY_PREFIX_WAIT", "0"),
        ("KVFERRY_PREFIX_WAIT", "2.1"),
    ],
)
def test_errors_of_wrong_values_name_the_variable(name: str, given: str) -> None:
    with pytest.raises(InvalidField) as refused:
        Settings.of({**ADDRESS, name: given})
    assert refused.value.values["field"] == name


def test_an_error_without_an_address_says_what_it_is() -> None:
    with pytest.raises(InvalidField, match="node server's address"):
        Settings.of({})


def test_a_key_in_place_of_its_files_name_is_refused_and_not_shown() -> None:
    text = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"
    found = Settings.of({**ADDRESS, "KVFERRY_TLS_CERT": "/c.pem", "KVFERRY_TLS_KEY": text})
    with pytest.raises(InvalidField, match="not what is in it") as refused:
        found.client()
    assert "c2VjcmV0" not in f"{refused.value} {refused.value.values}"
