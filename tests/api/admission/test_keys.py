"""Who a request comes from, and what only the administrator may do."""

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from rekindle.api.admission.keys import KeyHolder, Keys
from rekindle.generation.request import Rank
from rekindle.generation.status import EngineStatus, SlotStatus
from tests.api.client import USER, client_of
from tests.api.fakes import FakeResponder, api_settings

pytestmark = pytest.mark.anyio

UNLOAD = "/v1/models/tiny/unload"
GUARDED: list[tuple[str, str, Any]] = [
    ("POST", UNLOAD, None),
    ("POST", "/v1/cache/k1/pin", {"seconds": 5}),
    ("DELETE", "/v1/cache?scope=all", None),
    ("DELETE", "/v1/cache", None),  # both keys share it
    ("GET", "/metrics", None),
]
ADMINISTERED = api_settings(api_keys=("ann", "bob"), admin_key="root", admin_metrics=True)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        (bearer("ann"), "ann"),
        ({"x-api-key": "bob"}, "bob"),
        ({**bearer("revoked"), "x-api-key": "ann"}, "ann"),
        ({**bearer("bob"), "x-api-key": "revoked"}, "bob"),
        (bearer("revoked"), None),
        ({}, None),
    ],
)
def test_only_a_key_that_was_checked_identifies(headers: dict[str, str], key: str | None) -> None:
    identity = Keys(("ann", "bob")).identify(headers)
    assert identity == (None if key is None else KeyHolder(key, is_admin=False))


def test_without_keys_the_offered_one_is_a_label() -> None:
    assert Keys().identify(bearer("any")) == KeyHolder("any", is_admin=False)
    assert Keys().identify({}) == KeyHolder(None, is_admin=False)


def test_the_administrators_key_counts_beside_another() -> None:
    keys = Keys(("ann",), "root")
    assert keys.identify(bearer("root")) == KeyHolder("root", is_admin=True)
    assert keys.identify({**bearer("ann"), "x-api-key": "root"}) == KeyHolder("root", is_admin=True)
    assert keys.identify(bearer("ann")) == KeyHolder("ann", is_admin=False)


def test_an_administrators_key_alone_locks_nobody_out() -> None:
    assert Keys((), "root").identify({}) == KeyHolder(None, is_admin=False)


async def test_the_keys_of_a_request_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    identified: list[KeyHolder | None] = []
    identify = Keys.identify

    def counted(keys: Keys, headers: Mapping[str, str]) -> KeyHolder | None:
        identified.append(identify(keys, headers))
        return identified[-1]

    monkeypatch.setattr(Keys, "identify", counted)
    settings = api_settings(api_keys=("ann", "bob"), admin_key="root", separates_keys=True)
    async with client_of(FakeResponder(), settings) as client:
        for path in ("/slots", "/v1/cache", "/metrics"):
            assert (await client.get(path, headers=bearer("bob"))).status_code == 200
            assert identified == [KeyHolder("bob", is_admin=False)]
            identified.clear()


@pytest.mark.parametrize(("method", "path", "body"), GUARDED)
async def test_where_there_is_an_administrator_only_it_may(
    method: str, path: str, body: object
) -> None:
    async with client_of(FakeResponder(), ADMINISTERED) as client:
        refused = await client.request(method, path, json=body, headers=bearer("ann"))
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert error["code"] == "admin_key_required"
        assert "administrator's key" in error["message"]
        allowed = await client.request(method, path, json=body, headers=bearer("root"))
        assert allowed.status_code not in (401, 403)


@pytest.mark.parametrize(("method", "path", "body"), GUARDED)
async def test_without_an_administrator_every_client_may(
    method: str, path: str, body: object
) -> None:
    async with client_of(FakeResponder(), api_settings(api_keys=("ann",))) as client:
        reply = await client.request(method, path, json=body, headers=bearer("ann"))
        assert reply.status_code not in (401, 403)


async def test_with_an_administrators_key_alone_clients_need_none() -> None:
    async with client_of(FakeResponder(), api_settings(admin_key="root")) as client:
        reply = await client.post("/v1/chat/completions", json={"messages": [USER]})
        assert reply.status_code == 200
        assert (await client.post(UNLOAD)).status_code == 403
        assert (await client.get("/metrics")).status_code == 200


class TwoPeople(FakeResponder):
    """A slot of Ann's namespace that runs, and one of Bob's."""

    names: tuple[str, ...] = ()

    def status(self) -> EngineStatus:
        slots = tuple(
            SlotStatus(
                id=number,
                request_id=f"req-{number}",
                session=f"session-{number}",
                rank=Rank.BACKGROUND,
                n_prompt=41,
                n_rows=43,
                n_generated=47,
                n_cached=53,
                namespace=namespace,
            )
            for number, namespace in enumerate(self.names)
        )
        return EngineStatus(2, 2, 0, 8, 512, 1024, 45, slots=slots)


async def test_slots_show_each_caller_its_own_and_the_administrator_all() -> None:
    from rekindle.api.http.caller import namespace_of

    responder = TwoPeople()
    responder.names = (namespace_of({}, None, "ann"), namespace_of({}, None, "bob"))
    settings = api_settings(api_keys=("ann", "bob"), admin_key="root", separates_keys=True)

    async def slots(client: httpx.AsyncClient, key: str) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = (await client.get("/slots", headers=bearer(key))).json()
        return seen

    async with client_of(responder, settings) as client:
        own, other = await slots(client, "ann")
        assert (own["session"], own["id_task"], own["n_prompt_tokens"]) == (
            "session-0",
            "req-0",
            41,
        )
        assert other == {
            "id": 1,
            "n_ctx": 512,
            "is_processing": True,
            "id_task": None,
            "next_token": [{"n_decoded": 0}],
            "session": "",
            "class": "main",
            "n_prompt_tokens": 0,
            "n_rows": 0,
        }
        assert [slot["session"] for slot in await slots(client, "bob")] == ["", "session-1"]
        seen = [slot["session"] for slot in await slots(client, "root")]
        assert seen == ["session-0", "session-1"]
