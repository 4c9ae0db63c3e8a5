"""Hostfiles in DeepSpeed's format and its include and exclude filters.

A hostfile has one `name slots=COUNT` per line; a filter is a list of `name[:slot,slot...]` joined with `@`. Anything
else is an error that names the line.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hal.errors import ContractError
from hal.untrusted import parse_integer, shown

_LINE = re.compile(r"^(\S+)\s+slots=(\d+)$")
_NAME = re.compile(r"(?=.{1,253}$)\w[\w-]{0,62}(\.\w[\w-]{0,62})*\.?|[\da-fA-F.]*:[\da-fA-F:.]+(%\w+)?", re.ASCII)
"""A host name of at most 253 characters, of parts of at most 63, or an IPv6 address."""
_MOST_SLOTS = 4096
"""Most slots of a host; above the number of devices or cores of any machine."""
MAX_HOSTFILE_BYTES = 64 << 20
"""Largest hostfile; one with _MOST_SLOTS_TOGETHER hosts is smaller."""

_MOST_SLOTS_TOGETHER = 1 << 20
"""Most slots of a job, which bound the memory that a hostfile can take."""


@dataclass(frozen=True)
class Host:
    """A machine and the indices of its devices that the job uses."""

    name: str
    slots: tuple[int, ...]


def parse_hostfile(text: str) -> list[Host]:
    """The hosts of a hostfile, in order. Raises ContractError for an unreadable line, a repeated or an empty host."""
    hosts: dict[str, Host] = {}
    total = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#")[0].strip()
        if not line:
            continue
        match = _LINE.match(line)
        if match is None:
            raise ContractError(f"hostfile line {number}: expected 'name slots=COUNT', found {shown(line)}")
        name = match[1]
        if not _NAME.fullmatch(name):
            raise ContractError(
                f"hostfile line {number}: {shown(name)} is not a host name or address; write international names as "
                "xn--..."
            )
        count = parse_integer(match[2], 0, _MOST_SLOTS, f"hostfile line {number}: slots", ContractError)
        if count == 0 or name in hosts:
            raise ContractError(f"hostfile line {number}: host {name} {'has no slots' if not count else 'is repeated'}")
        total += count
        if total > _MOST_SLOTS_TOGETHER:
            raise ContractError(f"hostfile line {number}: more than {_MOST_SLOTS_TOGETHER} slots on all hosts together")
        hosts[name] = Host(name, tuple(range(count)))
    if not hosts:
        raise ContractError("the hostfile names no host; write one 'name slots=COUNT' per line")
    return list(hosts.values())


def select(hosts: Sequence[Host], include: str = "", exclude: str = "") -> list[Host]:
    """The hosts and slots that a filter selects, e.g. include="worker-0@worker-1:0,2" (DeepSpeed's syntax).

    They keep the order of the hostfile. Raises ContractError for an unknown host or slot.
    """
    if include and exclude:
        raise ContractError("give --include or --exclude, not both")
    named = _parse_filter(include or exclude, hosts)
    selected = []
    for host in hosts:
        slots = named.get(host.name)
        if include:
            keep = slots or ()
        else:
            keep = tuple(s for s in host.slots if slots is None or s not in slots)
        if keep or not (include or exclude):
            selected.append(Host(host.name, keep))
    if not selected:
        raise ContractError(f"the filter {shown(include or exclude)} leaves no slot on any host")
    return selected


def _parse_filter(text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    known = {h.name: h for h in hosts}
    if any(c.isspace() for c in text):
        raise ContractError(f"filter {shown(text)}: names are joined with @, without blanks")
    named: dict[str, tuple[int, ...]] = {}
    for part in filter(None, text.split("@")):
        name, _, listed = part.partition(":")
        if name not in known:
            among = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
            raise ContractError(f"filter {shown(text)}: host {shown(name)} is not in the hostfile ({among})")
        if name in named:
            raise ContractError(f"filter {shown(text)}: host {name} is named twice")
        what = f"filter {shown(text)}: host {name}: a slot"
        listed_slots = (parse_integer(s, 0, _MOST_SLOTS, what, ContractError) for s in listed.split(","))
        slots = tuple(listed_slots) if listed else known[name].slots
        wrong = [s for s in slots if s not in known[name].slots]
        if wrong or len(set(slots)) != len(slots):
            raise ContractError(f"filter {shown(text)}: host {name} has slots {known[name].slots}, not {slots}")
        named[name] = tuple(sorted(slots))
    return named


def this_host(hosts: Sequence[Host]) -> int:
    """The index of this machine in `hosts`, by name or address. Raises ContractError unless exactly one matches."""
    names = {socket.gethostname(), socket.gethostname().split(".")[0], socket.getfqdn(), "localhost", "127.0.0.1"}
    matches = [i for i, h in enumerate(hosts) if h.name in names or _is_local(h.name)]
    if len(matches) != 1:
        raise ContractError(
            f"this machine ({socket.gethostname()}) matches {'none' if not matches else 'several'} of the hosts "
            f"{', '.join(h.name for h in hosts)}; give its index with --node-rank"
        )
    return matches[0]


def _is_local(name: str) -> bool:
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))  # only this machine's own addresses can be bound
        return True
    except (OSError, UnicodeError):  # IDNA refuses some names
        return False
