"""The spawner without a hub: names, choices, what is read from the pipe, and processes of the same PID."""

import asyncio
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyterhub.proxy import ConfigurableHTTPProxy, Proxy

from fenka.jobs.job_spec import NAME
from fenka.jupyterhub import LINE_BYTES, FenkaSpawner, SpawnRefused, _lines, _obstacle, _unix_url
from fenka.procfs import start_ticks


def spawner(user: str = "ada", name: str = "", **traits: object) -> FenkaSpawner:
    """Return the spawner of a user's server."""
    orm = SimpleNamespace(name=name, server=None)
    return FenkaSpawner(user=SimpleNamespace(name=user), orm_spawner=orm, **traits)


def test_profiles_are_options_of_fenka_run() -> None:
    """The first one is the default, as for requests to the API without options."""
    offered = spawner(profiles={"none": "", "half": "--gpu-mem 4 --model 'Tesla T4'"})
    assert offered.run_options({}) == []
    assert offered.run_options({"profile": "half", "other": 7}) == [
        "--gpu-mem", "4", "--model", "Tesla T4",
    ]  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["profile", "x"]),
        st.one_of(st.none(), st.integers(), st.text(), st.lists(st.text()), st.floats()),
    )
)
def test_options_of_a_command_never_come_from_users(options: dict[str, object]) -> None:
    """Whatever the API passes on, the result is a profile or a refusal."""
    offered, chosen = spawner(), options.get("profile", "no card")
    if isinstance(chosen, str) and chosen in offered.profiles:
        assert offered.run_options(options) == offered.profiles[chosen].split()
        return
    with pytest.raises(SpawnRefused) as refused:
        offered.run_options(options)
    sentence = refused.value.jupyterhub_message
    assert "is not offered: choose one of no card, 2 GiB" in sentence
    assert len(sentence) < 200


def test_form_takes_the_first_of_several_values() -> None:
    """Browsers send lists."""
    read = spawner().options_from_form
    assert read({"profile": ["4 GiB of a card", "x"], "_xsrf": ["y"]}) == {
        "profile": "4 GiB of a card"
    }
    assert read({}) == {}
    with pytest.raises(SpawnRefused):
        read({"profile": ["x"]})


@given(st.text(min_size=1), st.text())
def test_name_of_each_server_is_a_jobs_name(user: str, name: str) -> None:
    """Users and servers have any names."""
    assert NAME.fullmatch(spawner(user, name).job_name)


@given(st.text(), st.text())
def test_servers_of_a_user_have_different_names(one: str, other: str) -> None:
    """The second would be refused."""
    same = spawner("ada", one).job_name == spawner("ada", other).job_name
    assert same == (one == other)


def read_lines(*parts: bytes) -> list[str]:
    """Return what is read of a pipe with these bytes."""

    async def read() -> list[str]:
        stream = asyncio.StreamReader(LINE_BYTES)
        lines = asyncio.ensure_future(collect(stream))
        for part in parts:
            stream.feed_data(part)
            await asyncio.sleep(0)
        stream.feed_eof()
        return await lines

    async def collect(stream: asyncio.StreamReader) -> list[str]:
        return [line async for line in _lines(stream)]

    return asyncio.run(read())


def test_what_a_user_writes_to_the_pipe_is_bounded() -> None:
    """The processes of a user may write there until the server has started."""
    assert read_lines(b"waiting, position 1\nsta", b"rted\n") == ["waiting, position 1", "started"]
    assert read_lines(b"x" * 10 * LINE_BYTES, b"\nstarted\n")[-1] == "started"
    assert read_lines(b"\xff\xfe\n") == ["\ufffd\ufffd"]
    assert read_lines(b"failed: no end") == ["failed: no end"]
    assert max(map(len, read_lines(*[b"y" * 1000] * 100)), default=0) <= LINE_BYTES


def test_signals_reach_only_the_process_that_was_started() -> None:
    """After a boot another process may have the PID of the hub's database."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        ticks = start_ticks(process.pid)
        mine, former = spawner(), spawner()
        mine.load_state({"pid": process.pid, "start_ticks": ticks})
        former.load_state({"pid": process.pid, "start_ticks": (ticks or 0) - 1})
        assert mine.get_state() == {"pid": process.pid, "start_ticks": ticks}
        assert not asyncio.run(former._signal(signal.SIGKILL))
        assert asyncio.run(mine._signal(0))
        assert asyncio.run(mine.poll()) is None
        assert asyncio.run(mine._signal(signal.SIGTERM))
        assert process.wait() == -signal.SIGTERM
        assert not asyncio.run(mine._signal(0))


def test_state_of_another_spawner_is_understood() -> None:
    """An administrator may change the class while servers run."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        server = spawner()
        server.load_state({"pid": process.pid})
        assert asyncio.run(server._signal(signal.SIGTERM))
    empty = spawner()
    empty.load_state({})
    assert (empty.pid, empty.get_state()) == (0, {})


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("5.3.0", ""),
        ("configurable-http-proxy, version 6.0", ""),
        ("5.2.9", "configurable-http-proxy 5.2.9 reaches no Unix sockets: install 5.3 or newer"),
        ("what?", "configurable-http-proxy 0.0 reaches no Unix sockets: install 5.3 or newer"),
    ],
)
def test_version_of_the_proxy_decides_about_sockets(said: str, sentence: str) -> None:
    """Older ones take the socket's path for the name of a host."""
    assert _obstacle(ConfigurableHTTPProxy(command=["echo", said]), False) == sentence


def test_obstacle_to_sockets_is_named() -> None:
    """By what the administrator can change."""
    assert _obstacle(Proxy(), False) == ("Proxy reaches no Unix sockets: use ConfigurableHTTPProxy")
    newest = ConfigurableHTTPProxy(command=["echo", "5.3.0"])
    assert "leave out c.JupyterHub.internal_ssl" in _obstacle(newest, True)


def test_sockets_that_must_be_and_cannot_are_refused() -> None:
    """The sentence names the setting that gives up the protection."""
    server = spawner(unix_sockets=True)
    server.user.settings = {"proxy": Proxy()}
    with pytest.raises(SpawnRefused) as refused:
        asyncio.run(server._choose_socket())
    assert refused.value.jupyterhub_message.endswith(
        "use ConfigurableHTTPProxy, or set c.FenkaSpawner.unix_sockets = False"
    )


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_path_of_a_socket_survives_urls(path: str) -> None:
    """Also with capitals, which JupyterHub makes small in names of hosts."""
    assert unquote(urlsplit(_unix_url(Path(path))).hostname or "") == str(Path(path))
