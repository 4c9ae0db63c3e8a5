"""docs/own-model: the program of each page runs in an empty folder, where its framework is installed."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "own-model"
NEEDS = {
    "index": (),
    "nanogpt": (),
    "transformers": ("transformers",),
    "accelerate": ("accelerate",),
    "fabric": ("lightning_fabric",),
    "deepspeed": ("deepspeed",),
    "torchtitan": ("triton", "torchdata", "tyro", "torchtitan.models.attention"),  # 0.3 has no such module
    "peft": ("peft", "transformers"),
    "trl": ("trl", "transformers"),
}


def program(page):
    (source,) = re.findall(r"^```python\n(.*?)^```$", (PAGES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    return source


def run(page, fresh, launch="python"):
    for package in NEEDS[page]:
        pytest.importorskip(package, reason=f"docs/own-model/{page}.md needs {package}")
    (fresh.folder / "train.py").write_text(program(page))
    done = fresh.run(f"HF_HUB_OFFLINE=1 {launch} train.py")
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_page_has_a_row_here_and_in_the_index():
    assert {p.stem for p in PAGES.glob("*.md")} == set(NEEDS)
    index = (PAGES / "index.md").read_text()
    assert all(f"({page}.md)" in index for page in NEEDS if page != "index")


@pytest.mark.slow
def test_the_index_shows_what_convert_prints(fresh):
    shown = re.search(r"^```text\n(.*?)^```$", (PAGES / "index.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert shown in run("index", fresh)


@pytest.mark.slow
def test_nanogpts_blocks_train_as_before(fresh):
    assert "replaced    5 LayerNorm by hal.nn.layers.LayerNorm" in run("nanogpt", fresh)


@pytest.mark.nightly
@pytest.mark.parametrize("page", ["transformers", "accelerate", "fabric", "torchtitan", "peft", "trl"])
def test_a_frameworks_program_runs(page, fresh):
    said = run(page, fresh)
    assert "by hal." in said, said


@pytest.mark.nightly
def test_zero_1_on_two_ranks_trains_as_one_process(fresh):
    losses = []
    for ranks in (1, 2):
        said = run("deepspeed", fresh, f"hal launch --nproc-per-node {ranks}")
        losses.append([float(x) for x in re.findall(r"^(?:\S+ )?(\d\.\d{6})$", said, re.MULTILINE)])
        assert len(losses[-1]) == 5, said
    assert losses[1] == pytest.approx(losses[0], abs=2e-5) and losses[0][-1] < losses[0][0] - 0.1
