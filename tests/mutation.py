"""Mutation testing: breaks the code in small ways, one at a time, and reports the breaks that the tests do not notice.

    python tests/mutation.py --samples 40 --seed 7 [--files FILE ...] [--json F] [--require 0.9]

Each mutant of a source file runs against the fast tests that TESTS names, in a copy of the tree. It is killed if one
fails, or if they run much longer than without it. Exits 1 if fewer than `--require` are killed. Mutants that cannot
change what the code guarantees are listed with the reason in fixtures/equivalent_mutants.json, and are not sampled.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = ROOT / "tests" / "fixtures" / "equivalent_mutants.json"
TESTS = {  # source file -> fast tests in tests/ that must detect its mutants, fastest first
    "hal/comm/contract.py": "hal/comm/test_comm.py",
    "hal/core/dispatch.py": "hal/core/test_dispatch.py hal/core/test_composite_ops.py",
    "hal/mesh.py": "hal/test_mesh.py",
    "hal/core/registry.py": "hal/core/test_registry.py hal/core/test_deterministic_mode.py",
    "hal/rng.py": "hal/test_rng.py",
    "model/gpt/kv_cache.py": "model/gpt/test_kv_cache.py model/inference/test_decoding.py",
    "model/checkpoint/reader.py": "model/checkpoint/test_loading.py model/checkpoint/test_checkpoint.py",
    "model/apps/convert/field_rules.py": (
        "model/apps/convert/test_field_rules.py model/apps/convert/test_hub_configs.py "
        "model/apps/convert/test_llama_fields.py"
    ),
    "model/data/gpt_dataset.py": "model/data/test_gpt_dataset.py model/data/test_blends.py",
    "model/apps/evaluation/tasks.py": "model/apps/evaluation/test_tasks.py",
    "model/inference/decoding.py": "model/inference/test_decoding.py",
    "model/data/indexed_dataset.py": "model/data/test_indexed_dataset.py",
    "model/training/optimizer.py": "model/training/test_optimizer.py model/training/test_lr_scheduler.py",
    "model/config/parallel_layout.py": "model/config/test_parallel_layout.py",
    "model/parallel/sequence_shard.py": "model/parallel/test_sequence_shard.py",
    "model/apps/planning/memory.py": "model/apps/planning/test_memory_formulas.py",
    "model/apps/planning/traffic.py": "model/apps/planning/test_traffic.py",
    "model/inference/sampling.py": "model/inference/test_sampling.py",
    "model/training/lr_scheduler.py": "model/training/test_lr_scheduler.py",
    "model/training/trainer_state.py": "model/training/test_trainer_state.py model/checkpoint/test_loading.py",
    "model/training/trainer.py": (
        "model/training/test_deferred_results.py model/training/test_rerun.py model/training/test_trainer.py "
        "model/checkpoint/test_loading.py model/training/test_verified_calls.py "
        "model/training/test_summed_gradients.py"
    ),
}

SWAPPED: dict[type[ast.AST], type[ast.AST]] = (
    {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
    | {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And}
    | {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
    | {ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
)
OPERATORS = (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp)
FLAGS = (ast.Name, ast.Attribute, ast.Call)  # conditions that are negated; others have mutants of their own


class Mutant(NamedTuple):
    """One change of one file. before, after: the expression; source: the whole changed file."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    source: str


def mutants(file: str, source: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its syntax tree."""
    text, changes = source.encode(), []
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    for node, parent in _nodes(ast.parse(source), None):
        for kind, old, new in _changes(node):
            begin, end = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
            changed = text[:begin] + f"({ast.unparse(new)})".encode() + text[end:]
            # The context distinguishes a change from the same change elsewhere in the file.
            expression = parent if isinstance(parent, ast.expr) or kind == "constant" else old
            texts = ast.unparse(expression), ast.unparse(copy.deepcopy(expression, {id(old): new}))
            changes.append(Mutant(file, old.lineno, kind, *texts, changed.decode()))
    return changes


def _nodes(node: ast.AST, parent: ast.AST | None) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """Each node with its context, the outermost for operators. Excluded: text, type annotations and what is imported
    for them, decorators."""
    if isinstance(node, ast.Raise) or _is_text(node) or _is_for_types(node):
        return
    yield node, parent
    inner = isinstance(node, ast.keyword) or (isinstance(node, OPERATORS) and isinstance(parent, OPERATORS))
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "msg"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child, parent if inner else node)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """(kind, expression, replacement)."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], SWAPPED[type(op)](), *node.ops[i + 1 :]]
            yield "comparison", node, ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield "arithmetic", node, ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield "boolean", node, ast.BoolOp(SWAPPED[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "negation", node, node.operand
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and isinstance(node.test, FLAGS):
        yield "negation", node.test, ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield "constant", node, ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Return) and not isinstance(node.value, (ast.Constant, type(None))):
        yield "return", node.value, ast.Constant(None)


def draw(files: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, drawn evenly from the files. The choice within a file does not depend on the other files."""
    equivalent = {(e["file"], e["before"], e["after"]) for e in json.loads(EQUIVALENT.read_text())}
    pools, chosen = [], []
    for file in files:
        candidates = mutants(file, (ROOT / file).read_text())
        random.Random(f"{seed} {file}").shuffle(candidates)
        pools.append([m for m in candidates if (m.file, m.before, m.after) not in equivalent])
    while len(chosen) < count and any(pools):
        chosen += [pool.pop() for pool in pools if pool]
    return sorted(chosen[:count])


def passes(tree: Path, tests: list[str], limit: int) -> bool:
    """Runs tests in a process forked from this one, which has imported torch and nothing of the project."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        os.environ["PYTHONPATH"] = sys.path[0] = str(tree)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        signal.alarm(limit)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-seed=0"]
        os._exit(int(pytest.main([*options, *(f"tests/{name}" for name in tests)])))
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    os.killpg(child, signal.SIGKILL)  # what the tests started, after a time-out
    return os.waitpid(child, 0)[1] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="+", choices=TESTS, default=list(TESTS), metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="F")
    parser.add_argument("--require", type=float, default=0.9, metavar="SHARE")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed.checkpoint  # noqa: F401  once for all the tests

    rows, limits = [], {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "build", "runs")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
        for number, mutant in enumerate(draw(args.files, args.samples, args.seed)):
            path, tests, began = tree / mutant.file, TESTS[mutant.file].split(), time.monotonic()
            if mutant.file not in limits:
                if not passes(tree, tests, 600):
                    raise SystemExit(f"{' '.join(tests)} fail without any mutant")
                limits[mutant.file], began = 30 + 4 * int(time.monotonic() - began), time.monotonic()
            before = path.read_text()
            path.write_text(mutant.source)
            os.utime(path, (number, number))  # Python matches a .pyc to its source by time and size
            killed = not passes(tree, tests, limits[mutant.file])
            path.write_text(before)
            seconds = round(time.monotonic() - began, 1)
            rows.append({**mutant._asdict(), "killed": killed, "seconds": seconds, "source": None})
            change = f"{mutant.file}:{mutant.line} {mutant.kind}: {mutant.before!r} -> {mutant.after!r}"
            print(f"{'killed  ' if killed else 'SURVIVED'} {seconds:5.1f} s  {change}", flush=True)
    share = sum(row["killed"] for row in rows) / max(1, len(rows))
    print(f"{share:.1%} of {len(rows)} mutants killed; {args.require:.0%} are required")
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "killed": share, "mutants": rows}, indent=1) + "\n")
    return 0 if share >= args.require else 1


if __name__ == "__main__":
    sys.exit(main())
