"""fsdp-bench submit: writes the batch script of a sweep beside its results, and submits it to Slurm."""

import os
import shlex
from importlib import resources
from pathlib import Path

import msgspec

from fsdp_bench.plan.export.files import templates
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import MachineError, ResultsError, SpecError, shown
from fsdp_bench.spec.files import write_atomically
from fsdp_bench.spec.subprocesses.own_python import own_python
from fsdp_bench.sweep.config.reading import check_folder_name
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.sweep.launchers.slurm import ask, job_state, seconds_of
from fsdp_bench.sweep.machine import probe_machine
from fsdp_bench.sweep.progress import JOB, submitted_job
from fsdp_bench.sweep.session import TrialSession
from fsdp_bench.sweep.start import open_session

SCRIPT = "submit.sbatch"
LOG = "job.log"

_ENDS_IN = 60.0
"""The seconds before the job's time limit at which Slurm is asked for a signal. It may send it a minute earlier."""


_NAMES = ("partition", "account", "qos")
"""Options that are passed on to sbatch as they are."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A job to submit: the command's options by name. Raises SpecError for a value that is not allowed."""

    file: Path
    nodes: int
    time: str
    gpus_per_node: int | None = None
    ranks_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    exclusive: bool = True
    before: tuple[str, ...] = ()
    """Lines of shell before the sweep: ``module load cuda``."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch."""
    results: Path = Path("results")
    machine: str | None = None
    only: tuple[str, ...] = ()
    retry: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks is None:
            raise SpecError("--gpus-per-node: how many GPUs of each node; on nodes without GPUs, --ranks-per-node")
        if (seconds_of(self.time) or 0) <= 0:
            raise SpecError(f"--time: {shown(self.time)} is not allowed; minutes, or as Slurm writes it: 2:00:00, 1-12")
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None and (not value or any(sign.isspace() for sign in value)):
                raise SpecError(f"--{name}: {shown(value)} is not allowed; a name")
        for option, values in (("--before", self.before), ("--sbatch", self.sbatch)):
            if any("\n" in value or not value.strip() for value in values):
                raise SpecError(f"{option}: one line each; give the option several times")

    @property
    def ranks(self) -> int | None:
        """Ranks on each node."""
        return self.ranks_per_node or self.gpus_per_node

    @property
    def machine_name(self) -> str:
        """The machine's folder in the results: ``2x4-PARTITION``."""
        return self.machine or f"{self.nodes}x{self.ranks}-{self.partition or 'slurm'}".replace(",", "-")

    @property
    def seconds(self) -> float:
        """The job's time limit."""
        seconds = seconds_of(self.time)
        assert seconds is not None
        return seconds

    @property
    def signal_seconds(self) -> int:
        """The time before its limit at which the job is told to end."""
        return int(min(_ENDS_IN, self.seconds / 4))


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A batch script that is written, and where its results will be."""

    script: Path
    folder: Path
    num_trials: int | None
    """The number of trials in the file; None if that depends on a GPU that is not here, or the file searches."""


def prepare(job: Submission) -> Prepared:
    """Check a submission and write its script.

    Raises SpecError or SweepFileError for what is not allowed, ResultsError if it cannot be written.
    """
    check_folder_name(job.machine_name, "--machine")
    for option, path in (("FILE", job.file), ("--results", job.results)):
        _check_in_script(option, path)
    found = read_file(job.file, probe_machine())
    longest = found.run.timeout_seconds
    if job.seconds <= longest + job.signal_seconds:
        raise SpecError(
            f"--time {job.time}: a single trial may take {longest:g} s ([run] timeout_seconds in {job.file.name}); give"
            " the job several times as long, or trials a shorter timeout_seconds"
        )
    num_trials = _num_trials(job)
    folder = (job.results / job.machine_name / found.name).absolute()
    script = folder / SCRIPT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(script, script_text(job, folder).encode())
    except OSError as error:
        raise ResultsError(f"{script}: cannot be written: {error.strerror or error}") from None
    return Prepared(script=script, folder=folder, num_trials=num_trials)


def _check_in_script(option: str, path: Path) -> None:
    """Raise for a path that a batch script cannot name: a line break ends a comment, a backslash is sbatch's own."""
    full = os.path.abspath(path)
    if "\\" in full or not full.isprintable():
        raise SpecError(
            f"{option}: {shown(full)} is not allowed; a batch script cannot name line breaks and backslashes"
        )


def _num_trials(job: Submission) -> int | None:
    """Return how many trials the file has; None if that depends on a GPU that is not here, or the file searches."""
    try:
        session = open_session(job.file, job.results, job.machine_name, job.only)
    except MachineError:
        return None
    return len(session.plan.cells) if isinstance(session, TrialSession) else None


def submit(prepared: Prepared) -> str:
    """Submit a script; return the job's ID. Raises MachineError if Slurm refuses, or a job is not done."""
    earlier = submitted_job(prepared.folder)
    state = job_state(earlier) if earlier is not None else None
    if state is not None:
        raise MachineError(
            f"job {earlier} runs this sweep already ({state.state}); fsdp-bench status says how far it is, scancel"
            f" {earlier} ends it"
        )
    job_id = ask("sbatch", "--parsable", str(prepared.script)).strip().partition(";")[0]
    if not job_id.isdigit():
        raise MachineError(f"sbatch: printed {shown(job_id)} instead of a job's ID")
    write_atomically(prepared.folder / JOB, to_json({"id": job_id}))
    return job_id


def script_text(job: Submission, folder: Path) -> str:
    """Return the batch script, which a person can read and change. Paths are absolute: a job may start elsewhere."""
    command = [
        *own_python("fsdp_bench", "sweep", os.path.abspath(job.file)),
        *("--results", os.path.abspath(job.results), "--machine", job.machine_name),
        *("--slurm", f"--ranks-per-node={job.ranks}"),
        *(part for value in job.only for part in ("--only", value)),
    ]
    template = resources.files(__package__).joinpath(f"{SCRIPT}.jinja").read_text()
    return (
        templates()
        .from_string(template)
        .render(
            job=job,
            name=folder.name,
            folder=shlex.quote(str(folder)),
            script=shlex.quote(str(folder / SCRIPT)),
            log=shlex.quote(str(folder / LOG).replace("%", "%%")),
            passed_on=[(name, value) for name in _NAMES if (value := getattr(job, name)) is not None],
            retry=shlex.join(part for value in job.retry for part in ("--retry", value)),
            command=shlex.join(command),
        )
    )
