"""docs/clusters.md: the batch script, the manifest and the commands, run with stand-ins for the schedulers."""

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from hal.launch.hosts import parse_hostfile
from hal.model.config.command_line import parse

TEXT = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()


def block(language, title):
    (found,) = re.findall(rf'^```{language} title="{title}"\n(.*?)^```$', TEXT, re.MULTILINE | re.DOTALL)
    return found


def test_the_manifest_starts_a_run_with_valid_options(monkeypatch):
    job = yaml.safe_load(block("yaml", "job.yaml"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    world = sum(replica["replicas"] for replica in replicas.values())
    monkeypatch.setenv("WORLD_SIZE", str(world))  # as the operator sets it
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"] == ["hal"] and container["args"][0] == "train"
        config = parse(container["args"][1:], {})
        assert config.save == config.load and config.backend == "cuda"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        folders = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert config.save in folders and any(config.data_path[0].startswith(folder) for folder in folders)


def test_the_hostfile_names_two_machines():
    assert [(host.name, len(host.slots)) for host in parse_hostfile(block("text", "hosts"))] == [
        ("node-a", 8),
        ("node-b", 8),
    ]


SRUN = """#!/bin/bash
# Runs the step on this machine, which is the only one of the allocation.
while [[ "$1" == --* ]]; do shift; done
SLURM_NODEID=0 exec "$@"
"""


@pytest.mark.nightly
def test_the_batch_script_trains_saves_and_continues(fresh):
    bin = fresh.folder / "bin"
    bin.mkdir()
    for name, script in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho 127.0.0.1\n")):
        (bin / name).write_text(script)
        (bin / name).chmod(0o755)
    script = block("bash", "train.sbatch")
    assert "#SBATCH --signal=TERM@300" in script and "#SBATCH --requeue" in script
    (fresh.folder / "train.sbatch").write_text(script)
    (fresh.folder / "text.txt").write_text("a short text, many times over. " * 400)
    options: dict[str, object] = {
        "num-layers": 1,
        "hidden-size": 32,
        "num-attention-heads": 2,
        "seq-length": 16,
        "micro-batch-size": 2,
        "global-batch-size": 4,
        "train-iters": 3,
        "text-file": "text.txt",
        "sample-tokens": 0,
    }
    slurm = "SLURM_JOB_NODELIST=here SLURM_JOB_NUM_NODES=1 BACKEND=cpu_ref DEVICES=2 CONFIG=run.yaml"
    start = f'export PATH="$PWD/bin:$PATH"; {slurm} SLURM_JOB_ID=%d bash train.sbatch'
    for job, iterations in ((1, 3), (2, 5)):
        (fresh.folder / "run.yaml").write_text(yaml.safe_dump({**options, "train-iters": iterations}))
        done = fresh.run(start % job)
        assert done.returncode == 0, done.stdout
        assert (fresh.folder / "runs" / str(job) / "run.json").exists()
    assert "iterations 4 to 5" in done.stdout, "the second job continues the first one's checkpoint"


@pytest.mark.nightly
def test_torchrun_starts_a_job(fresh):
    (command,) = (line for line in re.findall(r"^torchrun .*$", TEXT, re.MULTILINE))
    done = fresh.run(command.replace("torchrun", "python -m torch.distributed.run"))
    assert done.returncode == 0, done.stdout
    assert "iteration        2/" in done.stdout and (fresh.folder / "run" / "run.json").exists()


def test_the_launchers_options_exist():
    from hal.cli.launch import parser

    known = {flag for action in parser()._actions for flag in action.option_strings}
    commands = re.findall(r"hal launch (.*?) \\?\s*train ", TEXT.replace("\\\n", " "), re.DOTALL)
    assert len(commands) >= 3
    for command in commands:
        flags = {word for word in shlex.split(command) if word.startswith("--")}
        assert flags <= known, flags - known
    assert os.path.basename(__file__) in TEXT
