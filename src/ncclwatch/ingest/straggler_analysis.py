"""ByteDance's StragglerAnalysis traces: parquet, a row an operation of a worker, with its what-if analysis
(:mod:`.straggler_what_if`).

Columns as in the README of github.com/ByteDance-Seed/StragglerAnalysis: ``dp_rank``, ``stage``, ``rank``, ``step``, ``optype``,
``start_ts``, ``duration`` (s), ``seq_id``, ``mc``, ``gmc``. ``meta-NAME.yaml`` beside ``trace-NAME.parquet`` tells
``dsp_size``. Times count within a step, and steps are samples of a run, so nothing here says when anything was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.base import Format, Ingested, IngestError
from ncclwatch.ingest.kernels import Kernel, KernelRank, job_of
from ncclwatch.ingest.straggler_model import CLIP, COMPUTE, TYPES, ModelError, Op, Seen, build
from ncclwatch.ingest.straggler_what_if import Measured, Slowdowns, WhatIf
from ncclwatch.ingest.traced import SECOND, without_pids
from ncclwatch.model.events import Function
from ncclwatch.model.rows import distinct
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from ncclwatch.text import clean

MAGIC = b"PAR1"
COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc")
TAIL_BYTES = 1 << 16
"""Bytes at the end of a file among which its columns' names are looked for."""
MOST_ROWS, MOST_BYTES = 20_000_000, 1 << 31
"""Bound: rows of a trace, and bytes of its columns once unpacked."""
MOST_OPERATIONS, MOST_CELLS = 100_000, 50_000_000
STRAGGLES = 1.1
"""Fact: jobs with a slowdown from here on are counted as straggling (paper, section 4.1)."""
MOSTLY = 0.5
"""Fact: M_W and M_S from here on say that few workers, or the last stage, are most of it (paper, section 5)."""
SHOWN = 4
BLIND = (
    "when the steps of a StragglerAnalysis trace were: its times count within a step",
    "hosts, pids, communicators: a trace names workers by replica and stage",
)
_META = re.compile(r"^\s*dsp_size\s*:\s*(\d{1,6})\s*$", re.M)


@dataclass(frozen=True, slots=True)
class _Trace:
    """The columns of a file; ``steps`` are sorted numbers."""

    columns: Mapping[str, NDArray[Any]]
    steps: tuple[int, ...]
    replicas: int
    stages: int
    chunks: int


class StragglerAnalysis(Format):
    """One trace is one job."""

    name = "straggler-analysis"
    what = "StragglerAnalysis trace"

    def recognises(self, head: bytes, path: Path) -> bool:
        """A parquet file whose end names the columns of such a trace."""
        if not head.startswith(MAGIC):
            return False
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                tail = file.read(TAIL_BYTES)
        except OSError:
            return False
        return all(name.encode() in tail for name in ("optype", "start_ts", "dp_rank", "seq_id"))

    def read(self, files: Sequence[Path]) -> Sequence[Ingested]:
        """A job a file. Raises :class:`IngestError` where none of them could be read, or pyarrow is not there."""
        found: list[Ingested] = []
        problems: list[str] = []
        for file in files:
            try:
                found.append(_job(file))
            except IngestError as error:
                problems.append(str(error))
        if not found:
            raise IngestError(problems[0] if problems else "no trace", "give trace-NAME.parquet with meta-NAME.yaml beside it")
        return [replace(found[0], problems=(*found[0].problems, *problems)), *found[1:]]


def _job(path: Path) -> Ingested:
    name = clean(str(path), 200)
    trace = _columns(path)
    measured, step = _measured(trace, name)
    ranks = _ranks(trace)
    try:
        model = build(step, trace.stages, trace.chunks, trace.replicas * _shards(path))
        said = WhatIf(model, measured).slowdowns(trace.steps)
    except ModelError as error:
        raise IngestError(f"{name}: step {trace.steps[0]} of replica 0: {error}", "its schedule is not known here") from None
    job = job_of(_records(trace, ranks, clean(path.name, 80)), (), (), name)

    def amend(verdict: Verdict) -> Verdict:
        return without_pids(_said(verdict, said, ranks, clean(path.name, 80), trace.stages))

    return replace(job, blind=BLIND, notes=(), amend=amend)


# --- the file ------------------------------------------------------------------------------------------------------------


def _columns(path: Path) -> _Trace:
    """The columns of a file. Raises :class:`IngestError`."""
    name = clean(str(path), 200)
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise IngestError(f"{name}: pyarrow is needed to read parquet", "pip install 'ncclwatch[ingest]'") from None
    try:
        with parquet.ParquetFile(
            path, pre_buffer=False, thrift_string_size_limit=1 << 20, thrift_container_size_limit=1 << 20
        ) as file:
            about = file.metadata
            if lacking := [column for column in COLUMNS if column not in file.schema_arrow.names]:
                raise IngestError(f"{name}: no column {lacking[0]}", "it is no trace of StragglerAnalysis")
            unpacked = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
            if not 0 < about.num_rows <= MOST_ROWS or unpacked > MOST_BYTES:
                raise IngestError(f"{name}: {about.num_rows} rows", f"a trace may have up to {MOST_ROWS}")
            table = file.read(columns=list(COLUMNS), use_threads=False)
        kinds = table["optype"].cast(pyarrow.string()).combine_chunks().dictionary_encode()
        found = {column: table[column].to_numpy() for column in COLUMNS if column != "optype"}
        found["optype"], names = kinds.indices.to_numpy(zero_copy_only=False), kinds.dictionary.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise IngestError(f"{name}: {clean(str(error), 160)}", "it is damaged, or of another form") from None
    return _checked(found, names, name)


def _checked(found: dict[str, NDArray[Any]], names: Sequence[object], name: str) -> _Trace:
    """Columns of the kinds they must be, and sizes that are bounded. Raises :class:`IngestError` with the row."""
    for column in COLUMNS:
        values = found[column] = np.asarray(found[column])
        if values.dtype.kind not in "iuf":
            raise IngestError(f"{name}: column {column} holds no numbers", "it is no trace of StragglerAnalysis")
        wrong = ~np.isfinite(values.astype(np.float64)) | (np.abs(values.astype(np.float64)) > 1e12)
        if column in ("start_ts", "duration"):
            found[column] = values.astype(np.float64)
        else:
            # What is of no chunk has -1 there.
            wrong |= values < (-1 if column in ("mc", "gmc") else 0)
        if wrong.any():
            raise IngestError(f"{name}: row {int(np.argmax(wrong)) + 1}: {column} is {values[np.argmax(wrong)]}", "it is damaged")
        if column not in ("start_ts", "duration"):
            found[column] = values.astype(np.int64)
    unknown = np.array([one not in TYPES for one in names])[found["optype"]]
    if unknown.any():
        row = int(np.argmax(unknown))
        raise IngestError(f"{name}: row {row + 1}: optype {clean(str(names[int(found['optype'][row])]), 40)} is not known", "")
    order = np.array([TYPES.index(str(one)) for one in names])
    found["optype"] = order[found["optype"]]
    steps = tuple(distinct(found["step"]).tolist())
    replicas, stages, chunks = (int(found[column].max()) + 1 for column in ("dp_rank", "stage", "mc"))
    if replicas * stages > 1 << 20 or chunks > 1 << 10 or len(steps) * replicas > MOST_CELLS:
        raise IngestError(f"{name}: {replicas} replicas, {stages} stages, {chunks} chunks", "that is more than is judged")
    return _Trace(found, steps, replicas, stages, chunks)


def _shards(path: Path) -> int:
    """How many ranks reduce gradients together beside the replicas (``dsp_size``); 1 where no file says so."""
    beside = path.with_name(re.sub(r"^trace-", "meta-", path.stem) + ".yaml")
    try:
        with beside.open("rb") as file:
            match = _META.search(file.read(1 << 16).decode("utf-8", "replace"))
    except OSError:
        return 1
    return max(1, int(match[1])) if match is not None else 1


def _measured(trace: _Trace, name: str) -> tuple[Measured, list[Seen]]:
    """Begins and ends of each operation by step and replica, and the step that is the model. Raises :class:`IngestError`."""
    columns = trace.columns
    key = np.stack([columns["optype"], columns["seq_id"], columns["stage"]])
    kinds, operation = np.unique(key, axis=1, return_inverse=True)
    step = np.searchsorted(np.array(trace.steps), columns["step"])
    shape = (kinds.shape[1], len(trace.steps), trace.replicas)
    if kinds.shape[1] > MOST_OPERATIONS or int(np.prod(shape)) > MOST_CELLS:
        raise IngestError(
            f"{name}: {kinds.shape[1]} operations a step, {shape[1]} steps, {shape[2]} replicas", "that is too much"
        )
    begin, end = np.full((2, *shape), np.nan)
    place = (operation.reshape(-1), step, columns["dp_rank"])
    begin[place] = columns["start_ts"]
    end[place] = columns["start_ts"] + columns["duration"]
    operations = [Op(TYPES[kind], number, stage) for kind, number, stage in kinds.T.tolist()]
    if np.isnan(begin).any():
        at = np.argwhere(np.isnan(begin))[0]
        where = f"step {trace.steps[at[1]]}, replica {at[2]}: {operations[at[0]].kind} {operations[at[0]].number}"
        raise IngestError(f"{name}: {where} of stage {operations[at[0]].stage} is missing", "every step must have all operations")
    first = np.flatnonzero((step == 0) & (columns["dp_rank"] == 0))
    seen = [
        Seen(operations[operation.reshape(-1)[row]], float(columns["start_ts"][row]),
             float(columns["start_ts"][row] + columns["duration"][row]), int(columns["mc"][row]), int(columns["gmc"][row]))
        for row in first.tolist()
    ]  # fmt: skip
    return Measured(dict(zip(operations, begin, strict=True)), dict(zip(operations, end, strict=True))), seen


def _ranks(trace: _Trace) -> dict[tuple[int, int], int]:
    """The job's rank of each worker (replica, stage)."""
    columns = trace.columns
    place = columns["dp_rank"] * trace.stages + columns["stage"]
    _, first = np.unique(place, return_index=True)
    return {
        (int(columns["dp_rank"][row]), int(columns["stage"][row])): int(columns["rank"][row]) for row in first.tolist()
    }  # fmt: skip


def _records(trace: _Trace, ranks: Mapping[tuple[int, int], int], source: str) -> list[KernelRank]:
    """The collective of all workers that ends each step: steps are put one behind the other, having no time of their own."""
    columns, members = trace.columns, tuple(sorted(set(ranks.values())))
    if len(members) < len(ranks):
        return []
    begins, ends = columns["start_ts"], columns["start_ts"] + columns["duration"]
    long, first = float(ends.max() - begins.min()), float(begins.min())
    made = {rank: KernelRank(rank, f"{source} (rank {rank})", None) for rank in members}
    at = np.searchsorted(np.array(trace.steps), columns["step"])
    for row in np.flatnonzero(columns["optype"] == TYPES.index(CLIP)).tolist():
        rank = ranks[int(columns["dp_rank"][row]), int(columns["stage"][row])]
        begin, end = (SECOND + round((at[row] * long + float(times[row]) - first) * SECOND) for times in (begins, ends))
        function = int(Function.ALL_REDUCE)
        made[rank].kernels.append(
            Kernel(("all workers", members), function, int(at[row]) + 1, 0, -1, -1, begin, begin, max(begin, end))
        )
    return list(made.values())


# --- words ---------------------------------------------------------------------------------------------------------------


def _notes(said: Slowdowns, ranks: Mapping[tuple[int, int], int]) -> list[str]:
    """The analysis in lines."""
    lines = [
        f"what-if slowdown S {said.total:.3f}: steps take {said.step_s:.2f} s, without stragglers {said.ideal_s:.2f} s (estimate)"
    ]
    lines.append(f"by operation: {_listed(said.by_kind)}")
    lines.append(f"by stage: {_listed({f'stage {at}': value for at, value in said.by_stage.items()})}")
    lines.append(f"by replica: {_listed({f'replica {at}': value for at, value in said.by_replica.items()})}")
    workers = {
        f"rank {ranks[place]} (replica {place[0]}, stage {place[1]})": s for place, s in said.worker.items() if place in ranks
    }
    lines.append(f"by worker: {_listed(workers)}")
    few = ", ".join(f"replica {replica} stage {stage}" for replica, stage in said.few_workers[:SHOWN])
    lines.append(f"M_W {said.by_few_workers:.0%} of the loss goes with the slowest 3 % of workers ({few})")
    lines.append(f"M_S {said.by_last_stage:.0%} of the loss goes with the last stage")
    return lines


def _listed(values: Mapping[str, float]) -> str:
    largest = sorted(values.items(), key=lambda item: -item[1])[:SHOWN]
    more = f", {len(values) - len(largest)} more" if len(values) > len(largest) else ""
    return ", ".join(f"{name} {value:.3f}" for name, value in largest) + more


def _said(
    verdict: Verdict, said: Slowdowns, ranks: Mapping[tuple[int, int], int], source: str, stages: int
) -> Verdict:  # fmt: skip
    """The verdict as the analysis has it; of a job that does not straggle that it runs."""
    evidence = tuple(_notes(said, ranks))
    plain = replace(
        verdict, verdict_class=VerdictClass.RUNNING, culprits=(), victims=(), since=None, time=None, evidence=evidence,
        summary=f"steps take {said.total:.2f} times as long as without stragglers (what-if estimate)", confidence=1.0,
    )  # fmt: skip
    if said.total < STRAGGLES:
        return plain
    kind = max(said.by_kind, key=lambda name: said.by_kind[name])
    verdict_class = VerdictClass.SLOW_COMPUTATION if kind in COMPUTE else VerdictClass.SLOW_COMMUNICATION
    if kind not in COMPUTE:
        text = f"{plain.summary}: most of it is {kind}, which ends for all its ranks together: whose it is does not show"
        return replace(plain, verdict_class=verdict_class, summary=text, confidence=0.5)
    if said.by_few_workers >= MOSTLY:
        places = [place for place in said.few_workers if said.worker[place] >= 1 + MOSTLY * (said.total - 1)] or [
            said.few_workers[0]
        ]
        why, share = "few workers are slow", said.by_few_workers
    elif said.by_last_stage >= MOSTLY:
        places = [place for place in sorted(ranks) if place[1] == stages - 1]
        why, share = "the last stage has more to do than the others", said.by_last_stage
    else:
        text = f"{plain.summary}: most of it is {kind}, of no worker and no stage for good (as where sequences differ in length)"
        return replace(plain, verdict_class=verdict_class, summary=text, confidence=0.5)
    culprits = tuple(
        Culprit(ranks[place], None, source, None, None, stage=f"pipeline stage {place[1]}", reason=why)
        for place in places if place in ranks
    )  # fmt: skip
    named = ", ".join(str(one.rank) for one in culprits[:8]) + (" …" if len(culprits) > 8 else "")
    return replace(
        plain, verdict_class=verdict_class, culprits=culprits, stage=culprits[0].stage if culprits else "",
        summary=f"rank {named}: {why} ({kind}); {plain.summary}", confidence=round(min(1.0, max(0.0, share)), 2),
        rules=(*verdict.rules, "straggler-what-if"),
    )  # fmt: skip
