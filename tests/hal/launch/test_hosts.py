"""Hostfiles and filters: DeepSpeed's format; every line that cannot be parsed is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

import hal
from hal.cli import main as hal_command
from hal.cli.launch import argv_without_join, job_of
from hal.launch.agent import Job, _explain, run
from hal.launch.hosts import Host, parse_hostfile, select

TEXT = """# a cluster
worker-0 slots=4
worker-1   slots=8   # more

"""
HOSTS = [Host("worker-0", (0, 1, 2, 3)), Host("worker-1", (0, 1, 2, 3, 4, 5, 6, 7))]


def test_a_hostfile() -> None:
    assert parse_hostfile(TEXT) == HOSTS


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "names no host"),
        ("a slots=2\nb 4", "line 2: expected 'name slots=COUNT', found 'b 4'"),
        ("a slots=x", "line 1"),
        ("a slots=300000000", "line 1: slots should be an integer in 0..4096; found '300000000'"),
        ("a slots=" + "9" * 5000, "line 1: slots should be an integer"),
        ("a slots=٣", "line 1: slots should be an integer"),
        ("a slots=2\na slots=2", "line 2: host a is repeated"),
        ("a slots=0", "no slots"),
        ("a\0b slots=2", r"line 1: 'a\\x00b' is not a host name"),
        ("\ud800 slots=2", "line 1: .* is not a host name"),
        ("a..b slots=2", "line 1: 'a..b' is not a host name"),
        ("." * 100 + " slots=2", "line 1: .* is not a host name"),
        ("a" * 64 + " slots=2", "line 1: .* is not a host name"),
        ("a." * 127 + "b slots=2", "line 1: .* is not a host name"),
        ("-oOption=x slots=2", "line 1: '-oOption=x' is not a host name"),
        ("\x1b[31m slots=2", "line 1: .* is not a host name"),
    ],
)
def test_an_unreadable_hostfile_names_its_line(text: str, message: str) -> None:
    with pytest.raises(hal.ContractError, match=message):
        parse_hostfile(text)


def test_names_and_addresses_of_hosts() -> None:
    names = ["node-1", "rack_2.site.example.", "10.0.0.1", "::1", "fe80::1%eth0", "::ffff:10.0.0.1", "a" * 63]
    assert [host.name for host in parse_hostfile("\n".join(f"{n} slots=1" for n in names))] == names


@pytest.mark.parametrize(
    "include, exclude, left",
    [
        ("", "", HOSTS),
        ("worker-1", "", [HOSTS[1]]),
        ("worker-1:4,5@worker-0:2", "", [Host("worker-0", (2,)), Host("worker-1", (4, 5))]),
        ("", "worker-1", [HOSTS[0]]),
        ("", "worker-0:0,3", [Host("worker-0", (1, 2)), HOSTS[1]]),
    ],
)
def test_filters(include: str, exclude: str, left: list[Host]) -> None:
    assert select(HOSTS, include, exclude) == left


@pytest.mark.parametrize(
    "include, exclude, message",
    [
        ("worker-2", "", "host .worker-2. is not in the hostfile"),
        ("worker-0:4", "", "has slots"),
        ("worker-0:1,1", "", "has slots"),
        ("worker-0:one", "", "slot should be an integer in 0..4096; found 'one'"),
        ("worker-0:" + "9" * 5000, "", "slot should be an integer"),
        ("worker-0@worker-0", "", "named twice"),
        ("worker-0", "worker-1", "not both"),
        ("", "worker-0@worker-1", "leaves no slot"),
    ],
)
def test_wrong_filters_are_refused(include: str, exclude: str, message: str) -> None:
    with pytest.raises(hal.ContractError, match=message):
        select(HOSTS, include, exclude)


def test_a_hostfile_becomes_the_job_of_this_node(tmp_path) -> None:
    (tmp_path / "hosts").write_text(TEXT)
    options = ["--hostfile", str(tmp_path / "hosts"), "-i", "worker-0@worker-1:4,5", "--node-rank", "1"]
    job, join = job_of([*options, "--backend", "cpu_ref", "train", "--lr", "1"])
    assert (job.nproc, job.nnodes, job.node_rank, job.master_addr, job.master_port) == (2, 2, 1, "worker-0", 29500)
    assert job.command == ["train", "--lr", "1", "--backend", "cpu_ref"] and join
    assert job.environment == {"HAL_DEVICES": "4,5", "HAL_BACKEND": "cpu_ref"}


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--nproc-per-node", "2"], "nothing to run"),
        (["--nnodes", "2", "x.py"], "needs --master-addr"),
        (["--nnodes", "2", "--master-addr", "a", "--master-port", "80", "x.py"], "1024..65535"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", "x.py"], "its rank is less"),
        (["--include", "a", "x.py"], "--hostfile"),
        (["--join", "false", "x.py"], "--log-dir"),
        (["--nproc-per-node", "0", "x.py"], "0 processes on node 0"),
        (["--nnodes", "0", "x.py"], "node 0 of 0"),
        (["--master-port", "65536", "x.py"], "at most 65535"),
        (["--cluster-timeout", "nan", "x.py"], "--cluster-timeout is a number of seconds above 0"),
        (["--cluster-timeout", "-1", "x.py"], "--cluster-timeout is a number of seconds above 0"),
        (["--hostfile", "absent", "x.py"], "--hostfile absent cannot be read"),
        (["--hostfile", "/dev/zero", "x.py"], "more than 67108864 bytes"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(argv: list[str], message: str) -> None:
    with pytest.raises(hal.ContractError, match=message):
        job_of(argv)


@pytest.mark.parametrize("argv, words", [(["absent.py"], "no script absent.py"), (["trian"], "nor a hal command")])
def test_what_no_worker_could_run_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hal_command(["launch", "--nproc-per-node", "2", *argv]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(hal.HalError, match=r"--log-dir .*file cannot be created"):
        run(Job(["x.py"], nproc=1, log_dir=tmp_path / "file"))


def test_a_signal_without_a_name_can_end_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _explain(tmp_path, [0, 1], {1: -37}, ())[0] == 1
    assert "rank 1 failed first (killed by signal 37)" in capsys.readouterr().err


def test_options_of_other_launchers() -> None:
    """As torchrun, deepspeed and msrun spell them."""
    torchrun = "--nproc_per_node 4 --nnodes 2 --node_rank 1 --master_addr a --master_port 6000 train"
    deepspeed = "--num_nodes 2 --num_gpus 4 --node_rank 1 --master_addr a --master_port=6000 train"
    msrun = "--worker_num 8 --local_worker_num=4 --node_rank=1 --master_addr=a --master_port=6000 --join=True train"
    jobs = [job_of(line.split())[0] for line in (torchrun, deepspeed, msrun)]
    assert jobs[0] == jobs[1] == jobs[2] and (jobs[0].nproc, jobs[0].nnodes, jobs[0].master_port) == (4, 2, 6000)
    assert job_of(["--worker_num", "8", "--cluster_time_out=300", "train"])[0].nproc == 8
    with pytest.raises(hal.ContractError, match="--worker-num 8 is not --nnodes 1 times --nproc-per-node 3"):
        job_of(["--worker_num", "8", "--nnodes", "1", "--nproc-per-node", "3", "train"])


def test_only_the_launchers_own_join_is_taken_out() -> None:
    assert argv_without_join(["--join", "false", "x.py", "a"]) == ["x.py", "a"]
    assert argv_without_join(["--log-dir", "d", "--join=false", "x.py"]) == ["--log-dir", "d", "x.py"]


def test_all_slots_of_a_hostfile_together_are_bounded() -> None:
    with pytest.raises(hal.ContractError, match="line 257: more than 1048576 slots"):
        parse_hostfile("\n".join(f"h{n} slots=4096" for n in range(300)))
