"""A real Slurm of three nodes with their own addresses and host names, for as long as a block lasts.

The daemons come from `scripts/install-slurm`. Partition `main` preempts `low`, whose jobs are requeued. Nothing of the
cluster outlives the block: no process, mount, namespace or interface.
"""

import getpass
import os
import pwd
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from tests.support.slurm.namespaces import COMMAND_SECONDS, Network, has_leftovers, network, remove

REPOSITORY = Path(__file__).parents[3]
SLURM = REPOSITORY / ".cache/slurm"
USERS = {"alice": 1_990_001, "bob": 1_990_002}
"""Users that exist on the cluster if root runs it."""
START_SECONDS = 30.0
WAIT_SECONDS = 60.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost=login
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
MailProg=/bin/true
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=5
KillWait=5
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=10 MaxTime=60
PartitionName=low Nodes=ALL State=UP PriorityTier=1 GraceTime=30 MaxTime=60
"""


@dataclass
class SlurmCluster:
    """The cluster; its commands run on the login machine."""

    network: Network
    nodes: list[str]
    environment: dict[str, str]

    @property
    def root(self) -> Path:
        """A folder that all machines share."""
        return self.network.root

    def run(
        self,
        *command: str,
        user: int | None = None,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        timeout: float = COMMAND_SECONDS,
    ) -> CompletedProcess[str]:
        """Run a command on the login machine."""
        return self.network.run(
            command, user=user, env=self.environment | dict(env or {}), check=check, timeout=timeout
        )

    def start_node(self, name: str) -> None:
        """Start a node."""
        daemon = [str(SLURM / "usr/sbin/slurmd"), "-D", "-N", name, "-f", self.environment["SLURM_CONF"]]
        stepd = str(SLURM / "usr/sbin/slurmstepd")
        self.network.start(name, self.nodes.index(name) + 1, [*daemon, "-d", stepd], self.environment)

    def kill_node(self, name: str) -> None:
        """Cut a node's power."""
        self.network.kill(name)

    def state(self, job: str) -> str:
        """Return a job's state, such as RUNNING; nothing once Slurm has forgotten it."""
        done = self.run("scontrol", "--oneliner", "show", "job", job, check=False)
        fields = dict(part.partition("=")[::2] for part in done.stdout.split())
        return fields.get("JobState", "")

    def wait_for(self, condition: Callable[[], object], seconds: float = WAIT_SECONDS, show: str = "") -> None:
        """Wait until a condition holds, or fail with what the daemons logged last."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{show}\n{self.log()}"
            time.sleep(0.1)

    def wait_for_state(self, job: str, *states: str) -> None:
        """Wait until a job is in one of some states."""
        self.wait_for(lambda: self.state(job) in states, WAIT_SECONDS, f"{job} is {self.state(job)}")

    def idle(self) -> int:
        """Return how many nodes are idle."""
        done = self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D", check=False)
        return int(done.stdout.split("\n")[0] or 0) if done.returncode == 0 else 0

    def log(self) -> str:
        """Return the ends of the daemons' logs."""
        files = [*self.root.glob("log/*.log"), *self.root.glob("*.out")]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-1_500:]}" for file in files)


@contextmanager
def slurm_cluster(count: int = 3) -> Iterator[SlurmCluster]:
    """Start a cluster and wait until its nodes are idle."""
    root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    root.chmod(0o755)
    nodes = [f"n{number}" for number in range(1, count + 1)]
    try:
        users = USERS if os.geteuid() == 0 else _missing_user()
        environment = _environment(root)
        with network(root, users, nodes, environment) as inside:
            cluster = SlurmCluster(inside, nodes, environment)
            _configure(root, nodes)
            cluster.run(str(SLURM / "usr/sbin/slurmctld"), "-f", cluster.environment["SLURM_CONF"])
            for name in nodes:
                cluster.start_node(name)
            cluster.wait_for(lambda: cluster.idle() == count, START_SECONDS)
            yield cluster
        assert has_leftovers(root) == []
    finally:
        remove(root)


def _configure(root: Path, nodes: Sequence[str]) -> None:
    for name in ("state", "log", "spool", "shared"):
        (root / name).mkdir(exist_ok=True)
    (root / "shared").chmod(0o1777)
    lines = [f"NodeName={name} CPUs=4 CoresPerSocket=4 RealMemory=4000 Gres=gpu:2" for name in nodes]
    user = "root" if os.geteuid() == 0 else getpass.getuser()
    text = CONFIGURATION.format(user=user, plugins=_library() / "slurm-wlm", root=root, nodes="\n".join(lines))
    (root / "slurm.conf").write_text(text)
    # Slurm wants character devices for GPUs.
    gpus = [f"NodeName={name} Name=gpu File=/dev/tty[1-2]\n" for name in nodes]
    (root / "gres.conf").write_text("".join(gpus))


def _environment(root: Path) -> dict[str, str]:
    library = _library()
    kept = ("COVERAGE_PROCESS_CONFIG", "PYTEST_XDIST_TESTRUNUID", "ROLLOUT_APPTAINER")
    programs = [
        SLURM / "usr/bin",
        SLURM / "usr/sbin",
        SLURM / "bin",
        SLURM / "sbin",
        REPOSITORY / ".venv/bin",
    ]
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PATH": ":".join([*map(str, programs), "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]),
        "LD_LIBRARY_PATH": f"{library}:{library}/slurm-wlm:{SLURM / 'lib' / library.name}",
        "SLURM_CONF": str(root / "slurm.conf"),
        "HOME": str(Path.home()),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "COLUMNS": "200",
    }


def _library() -> Path:
    return next((SLURM / "usr/lib").glob("*/slurm-wlm")).parent


def _missing_user() -> dict[str, int]:
    """Return this user, if the system does not know it by name."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return {getpass.getuser(): os.geteuid()}
    return {}
