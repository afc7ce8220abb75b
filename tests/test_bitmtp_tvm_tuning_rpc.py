"""Measuring on a board: a tracker and a server on this machine stand for the desk and the board."""

import pytest
from tuning_folder import ABORTS, EQUAL, RULE, WRONG, plan, task, write_folder

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.tune import main
from bitmtp_tvm.tuning_log import read_measurements
from bitmtp_tvm.tuning_rpc import RpcWorker, parse_tracker

KEY = "board"


@pytest.fixture(scope="module")
def tracker():
    from tvm.rpc.server import Server
    from tvm.rpc.tracker import Tracker

    host = "127.0.0.1"
    found = Tracker(host, port=9290, port_end=9399, silent=True)
    address = host, found.port
    server = Server(host, port=9400, port_end=9499, tracker_addr=address, key=KEY, silent=True)
    yield host, found.port
    server.terminate()
    found.terminate()


@pytest.mark.slow
def test_kernels_are_sent_checked_and_timed_over_rpc(tracker, tmp_path, capsys, monkeypatch):
    write_folder(tmp_path, task("two", 2, functions=(RULE, WRONG, EQUAL, ABORTS)))
    arguments = ["--measure", str(tmp_path), "--rpc", "{}:{}".format(*tracker), "--key", KEY]
    assert main(arguments) == 0
    assert "us, kernel by kernel" in capsys.readouterr().out
    known = read_measurements(tmp_path)
    found = {f.rpartition("_")[2]: status for f, (status, _) in known.alone["two"].items()}
    assert found == {RULE: "ok", WRONG: "wrong", EQUAL: "ok", ABORTS: "crashed"}
    assert known.twins == {"two": "ok"} and not known.chains
    assert all(0 < seconds < 1 for seconds in known.seconds("two").values())
    # The last one took the server with it.
    monkeypatch.setattr("bitmtp_tvm.tuning_rpc.REQUEST_SECONDS", 0.5)
    assert main([*arguments, "--resume"]) == 1
    assert "start rpc_tracker there and rpc_server" in capsys.readouterr().err


def test_a_board_that_nobody_knows_is_named(tmp_path):
    worker = RpcWorker(plan(task("two", 2, functions=(RULE,))), tmp_path, ("127.0.0.1", 9), KEY)
    with pytest.raises(BitMTPError, match=r"no device board behind the RPC tracker 127\.0\.0\.1:9"):
        worker.ask({"do": "device"})


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:0", "host:70000"])
def test_a_tracker_is_host_and_port(text):
    with pytest.raises(UsageError, match="is not HOST:PORT"):
        parse_tracker(text)
    assert parse_tracker("::1:9190") == ("::1", 9190)
