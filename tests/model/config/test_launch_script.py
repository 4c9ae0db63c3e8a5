"""`hal config import` executes a launch script with recorders in place of its launchers, and explains every option."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hal.cli.config import main
from hal.model.config.command_line import parse
from hal.model.config.launch_script import recorded
from hal.model.config.schema import ConfigError

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
TRAINING = "--micro-batch-size 1 --train-iters 3 --lr 1e-3 --mock-data --vocab-size 96"


def script(folder, text, name="train.sh"):
    path = folder / name
    path.write_text(text)
    return path


LAUNCHES = {
    "torchrun --nproc_per_node 2 --nnodes=1 pretrain_gpt.py": 2,
    "python -m torch.distributed.launch --nproc_per_node=2 --master_port 6000 ../pretrain_gpt2.py": 2,
    "python -m torch.distributed.run --nproc-per-node 2 pretrain_gpt.py": 2,
    "export DLWS_NUM_WORKER=2; deepspeed --num_nodes ${DLWS_NUM_WORKER} --num_gpus 4 --hostfile h pretrain_gpt.py": 8,
    "msrun --worker_num=4 --local_worker_num=4 --master_port 8848 --join=True pretrain_gpt.py": 4,
    "srun -l --ntasks 8 sh -c 'python -u /code/pretrain_gpt.py $OPTIONS'": 8,
    "srun -N2 --ntasks-per-node=4 python pretrain_gpt.py": 8,
    "srun -n8 python pretrain_gpt.py": 8,
    "srun --nodes 2 --ntasks-per-node 1 torchrun --nproc_per_node 4 --nnodes 2 pretrain_gpt.py": 8,
    "accelerate launch --num_processes 8 --num_machines 2 --machine_rank 0 pretrain_gpt.py": 8,
    "mpirun -np 8 python pretrain_gpt.py": 8,
    "eval exec python3 pretrain_gpt.py": None,
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_launcher_is_recorded_and_none_is_started(launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = "" if "$OPTIONS" in launch else "$OPTIONS"
    text = f"export OPTIONS='{MODEL} --bf16'\nset -e\n{launch} {options}\n"
    with recorded(script(tmp_path, text)) as (command,):
        assert command.trains_gpt and command.options == (*MODEL.split(), "--bf16")
        assert command.processes == LAUNCHES[launch]


@pytest.mark.parametrize(
    "launch, processes",
    [
        ("srun python pretrain_gpt.py", 8),
        ("srun bash -c 'python pretrain_gpt.py'", 8),
        ("srun torchrun --nproc_per_node 2 pretrain_gpt.py", 4),
        ("python pretrain_gpt.py", None),
    ],
)
def test_the_header_of_a_job_counts_for_what_it_launches(launch, processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = script(tmp_path, f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node 4\n{launch}\n", "job.sh")
    for start in (job, script(tmp_path, "sbatch --partition gpu job.sh\n")):
        with recorded(start) as (command,):
            assert (command.processes, command.nodes) == (processes, 1 if processes is None else 2)


def test_a_job_script_is_followed_and_arguments_and_files_reach_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, f'. ./common.sh\nsrun bash -c "python pretrain_gpt.py {MODEL} $EXTRA"\n', "job.sh")
    (tmp_path / "common.sh").write_text("EXTRA='--lr 1e-4'\n")
    (tmp_path / "template.json").write_text('{"train_micro_batch_size_per_gpu": MICRO}')
    text = (
        'mkdir -p logs; sed "s/MICRO/$1/" template.json > made.json\nsbatch -N 4 job.sh\npython tools/preprocess.py\n'
    )
    text += "pkill -9 python; rm -rf common.sh; deepspeed pretrain_gpt.py --deepspeed_config made.json | tee logs/log\n"
    before = sorted(tmp_path.iterdir())
    with recorded(script(tmp_path, text), ["7"]) as (first, other, second):
        assert first.options == (*MODEL.split(), "--lr", "1e-4") and not other.trains_gpt
        assert Path(second.options[1]).read_text() == '{"train_micro_batch_size_per_gpu": 7}'
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "train.sh"])


PLACEHOLDERS = """
CHECKPOINT=<Specify path>
export VOCABULARY=<Specify path to file>/vocab.json # GPT2's
TOKENIZER="your tokenizer model path"
DATA=your data path
python pretrain_gpt.py --load $CHECKPOINT --vocab-file $VOCABULARY --tokenizer-model $TOKENIZER --data-path $DATA
"""


def test_placeholders_are_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with recorded(script(tmp_path, PLACEHOLDERS)) as (command,):
        expected = ("Specify_path", "Specify_path_to_file_/vocab.json", "your_tokenizer_model_path", "your_data_path")
        assert command.options[1::2] == expected


def test_what_a_script_says_that_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = 'if [ ! -f pretrain_gpt.py ]; then echo "no pretrain_gpt.py here"; exit 3; fi; python pretrain_gpt.py'
    says = r"exit code 3 and started nothing. It printed:\n  no pretrain_gpt"
    with pytest.raises(ConfigError, match=says), recorded(script(tmp_path, text)):
        pass
    (tmp_path / "pretrain_gpt.py").touch()
    with recorded(script(tmp_path, text)) as (command,):
        assert command.trains_gpt


def test_a_script_that_waits_is_stopped_with_its_children(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"did not end within 0\.5 seconds"),
        recorded(script(tmp_path, "sleep 600 & wait"), timeout=0.5),
    ):
        pass


def test_the_yaml_says_what_became_of_every_option_and_resolves(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"torchrun --nproc_per_node 2 pretrain_gpt.py {MODEL} {TRAINING} --model-parallel-size 2"
    assert main(["import", "--output", "out.yaml", str(script(tmp_path, text + " --DDP-impl local"))]) == 0
    assert "executing" in capsys.readouterr().err
    written = (tmp_path / "out.yaml").read_text()
    lines = {line.partition(":")[0]: line for line in written.splitlines()}
    assert "as in the script" in lines["num-layers"]
    assert "translated" in lines["tensor-model-parallel-size"]
    assert "there is one implementation of data parallelism" in lines["# --DDP-impl"]
    config = parse(["--config", "out.yaml", "--backend", "cpu_ref"], {})
    assert (config.num_layers, config.tensor_model_parallel_size, config.nproc_per_node) == (4, 2, 2)


def test_refused_options_are_comments_and_the_exit_code_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = script(tmp_path, f"python pretrain_gpt.py {MODEL} {TRAINING} --fp4-format e2m1 --embed-layernorm")
    assert main(["import", str(path)]) == 1
    captured = capsys.readouterr()
    assert "# --fp4-format e2m1: " in captured.out and "# --embed-layernorm" in captured.out
    assert "refused" in captured.err


@pytest.mark.parametrize(
    "text, arguments, says",
    [
        ("echo nothing", [], "starts no training of a GPT .* It started: nothing"),
        ("python pretrain_bert.py --a 1", [], r"started:\n  python ... pretrain_bert.py --a 1"),
        (
            "for n in 2 4; do python pretrain_gpt.py --num-layers $n; done",
            [],
            r"by --number:\n  1: .*\n  2: .*layers 4",
        ),
        ("python pretrain_gpt.py --num-layers 2", ["--number", "3"], "--number 3: .* starts 1 trainings"),
        ("python pretrain_gpt.py --num-lairs 2", [], "Did you mean --num-layers"),
        (
            "python pretrain_gpt.py --embed-layernorm --num-query-groups 3",
            [],
            "(?s)--embed-layernorm.*--num-query-groups 3",
        ),
    ],
)
def test_what_cannot_be_imported_is_explained(text, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        main(["import", *arguments, str(script(tmp_path, text))])


@pytest.mark.nightly
def test_an_imported_script_trains_with_the_losses_of_hals_own_options(tmp_path):
    shared = TRAINING.replace("--micro-batch-size 1 ", "") + " --weight-decay 0.1 --clip-grad 1.0"
    theirs = f"{MODEL} {shared} --no-bias-gelu-fusion --batch-size 2 --warmup .1"
    path = script(tmp_path, f"torchrun --nproc_per_node 1 pretrain_gpt.py {theirs}")

    def hal(*arguments):
        command = [sys.executable, "-m", "hal", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=120)

    hal("config", "import", "--output", "out.yaml", path.name)
    hal("train", "--backend", "cpu_ref", "--config", "out.yaml", "--num-layers", "2", "--run-dir", "a")
    own = f"{MODEL} {shared} --gelu-approximate none --micro-batch-size 2 --lr-warmup-fraction .1 --num-layers 2"
    hal("train", "--backend", "cpu_ref", "--run-dir", "b", *own.split())
    first, second = (json.loads((tmp_path / name / "run.json").read_text())["losses"] for name in "ab")
    assert first == second and len(first) == 3
