"""Generates C++ from operators.table: the pair aclnnNameGetWorkspaceSize / aclnnName for each line.

The generated GetWorkspaceSize has the C signature given by the argument kinds, decodes every argument through opapi.h
(which refuses null pointers, dtypes and foreign memory with the library's codes) and captures the expression as work.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("operators.table")
LIMITS = Path(__file__).parents[1] / "constraints.csv"

C_TYPES = {
    "T": "const aclTensor*",
    "L": "const aclTensorList*",
    "S": "const aclScalar*",
    "A": "const aclScalarList*",
    "I": "const aclIntArray*",
    "B": "const aclBoolArray*",
    "i": "int64_t",
    "d": "double",
    "f": "float",
    "b": "bool",
    "c": "int8_t",
    "s": "const char*",
    "t": "aclDataType",
}


@dataclass(frozen=True)
class Argument:
    kind: str
    optional: bool
    dtypes: str
    name: str

    def decode(self, op: str) -> str:
        """The C++ expression that converts the C argument (named NAME_raw) to the type that the table's expressions
        use."""
        raw, where = f"{self.name}_raw", f'"aclnn{op}", "{self.name}"'
        if self.kind == "T":
            return f'halsim::tensor({where}, {raw}, "{self.dtypes}", {"false" if self.optional else "true"})'
        if self.kind == "S":
            return f"halsim::optional_scalar({raw})" if self.optional else f"halsim::scalar({where}, {raw})"
        if self.kind == "L" and self.optional:
            return f"{raw} ? halsim::tensors({where}, {raw}) : std::vector<Tensor>()"
        plain = {
            "L": f"halsim::tensors({where}, {raw})",
            "I": f"halsim::integers({raw})",
            "A": f"halsim::scalars({where}, {raw})",
            "B": f"halsim::booleans({raw})",
        }
        plain |= {"s": f"std::string({raw})", "t": f"halsim::scalar_type({raw})"}
        return plain.get(self.kind, raw)


@dataclass(frozen=True)
class Operator:
    name: str
    arguments: tuple[Argument, ...]
    targets: tuple[str, ...]
    expression: str
    rule: str  # C++ that refuses calls that the operator does not accept; empty if there is no rule
    planned: bool  # the expression runs in phase one and returns the work
    waits: bool  # the work waits for other processes

    def _operands(self) -> str:
        """C++ that lists the operands for `write`: an infinite result is no overflow if an operand is infinite."""
        used = [a for a in self.arguments if a.name != "out" and re.search(rf"\b{a.name}\b", self.expression)]
        tensors, lists, scalars = (
            ", ".join(f"{mark}{a.name}" for a in used if a.kind in kinds and not (a.kind == "S" and a.optional))
            for kinds, mark in (("T", "&"), ("L", "&"), ("Sdf", ""))
        )
        return f"Operands operands({{{tensors}}}, {{{lists}}}, {{{scalars}}});"

    def source(self) -> str:
        parameters = ", ".join(f"{C_TYPES[a.kind]} {a.name}_raw" for a in self.arguments)
        decoded = "".join(f"    [[maybe_unused]] auto {a.name} = {a.decode(self.name)};\n" for a in self.arguments)
        if self.planned:
            work = f"    return {self.expression};\n"
        else:
            if len(self.targets) == 1:
                body = f"write({self.targets[0]}, {self.expression});"
            elif self.targets:
                writes = " ".join(f"write({t}, std::get<{i}>(all));" for i, t in enumerate(self.targets))
                body = f"auto all = {self.expression}; {writes}"
            else:
                body = f"{self.expression};"
            work = f"    return [=]() mutable {{ {self._operands()} {body} }};\n"
        return (
            f"aclnnStatus aclnn{self.name}GetWorkspaceSize(\n"
            f"    {parameters}, uint64_t* workspace, aclOpExecutor** executor) {{\n"
            f'  return plan("aclnn{self.name}", workspace, executor, [&]() -> Work {{\n'
            f"{decoded}{self.rule}{work}  }}{', Wait::may_block' if self.waits else ''});\n}}\n"
            f"aclnnStatus aclnn{self.name}(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {{\n"
            f"  return execute(executor, stream);\n}}\n"
        )


LINE = re.compile(r"(\w+)\((.*?)\)(?: if (\w+)\((.*?)\))?: (.*)")
ARGUMENT = re.compile(r"([TLSAIBidfbcst])(\?)?(?:\[(\w+)\])? (\w+)")
ASSIGNMENT = re.compile(r"(\w+(?:, \w+)*) = (.*)")


def parse(text: str) -> list[Operator]:
    """Reads the table; raises ValueError with the line number for a line it cannot read or a name given twice."""
    operators: dict[str, Operator] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        pieces = [ARGUMENT.fullmatch(piece) for piece in match[2].split(", ")] if match else []
        if match is None or any(piece is None for piece in pieces):
            raise ValueError(f"operators.table line {number}: expected 'Name(kind argument, ...): expression': {line}")
        arguments = tuple(Argument(p[1], bool(p[2]), p[3] or "", p[4]) for p in pieces if p)
        names = {a.name for a in arguments}
        assignment = ASSIGNMENT.fullmatch(match[5])
        targets: tuple[str, ...] = ()
        expression = match[5]
        if assignment and set(assignment[1].split(", ")) <= names:
            targets, expression = tuple(assignment[1].split(", ")), assignment[2]
        if match[1] in operators:
            raise ValueError(f"operators.table line {number}: {match[1]} is there already")
        waits = expression.startswith("wait ")
        planned = waits or expression.startswith("plan ")
        rule = f'    rules::{match[3]}("aclnn{match[1]}", {match[4]});\n' if match[3] else ""
        expression = expression.removeprefix("wait ").removeprefix("plan ")
        operators[match[1]] = Operator(match[1], arguments, targets, expression, rule, planned, waits)
    return list(operators.values())


def generate_limits() -> str:
    """The C++ header with what constraints.csv says in numbers and dtypes: `limits::attention_heads.least` and `.most`,
    `limits::mc2_ranks`, an array of numbers, and `limits::hccl_product`, an array of names.
    """
    lines = [line for line in LIMITS.read_text().splitlines() if line and not line.startswith("#")]
    values = []
    for row in csv.DictReader(lines):
        name = row["id"].replace(".", "_")
        if row["kind"] == "range":
            least, most = row["value"].split("..")
            values.append(f"constexpr Range {name}{{{least}, {most}}};")
        elif row["kind"] == "numbers":
            values.append(f"constexpr int64_t {name}[] = {{{', '.join(row['value'].split())}}};")
        elif row["kind"] == "dtypes":
            dtypes = ", ".join(f'"{dtype}"' for dtype in row["value"].split())
            values.append(f"constexpr const char* {name}[] = {{{dtypes}}};")
    return (
        "#pragma once\n#include <cstdint>\nnamespace halsim::limits {\nstruct Range {\n  int64_t least, most;\n"
        "  constexpr bool holds(int64_t n) const { return n >= least && n <= most; }\n};\n"
        + "\n".join(values)
        + "\n}  // namespace halsim::limits\n"
    )


def generate() -> str:
    """The C++ source of every operator of the table."""
    head = '#include "attention.h"\n#include "kernels.h"\n#include "mc2.h"\n#include "rules.h"\n\n'
    head += "using namespace halsim;\nusing aclnnStatus = int;\n\n"
    return head + 'extern "C" {\n\n' + "\n".join(op.source() for op in parse(TABLE.read_text())) + "\n}\n"
