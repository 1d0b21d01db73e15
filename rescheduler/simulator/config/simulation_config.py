"""What a simulation is of: cluster, time, requests, forecasts, policies; read from YAML."""

import math
from argparse import ArgumentError
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple, TypeVar

from rescheduler.cluster.cluster_view import UNLIMITED
from rescheduler.cluster.registry import COUNT, NOT_NEGATIVE, POSITIVE, Checked
from rescheduler.commands.command_parser import CommandParser
from rescheduler.ordering.expected_rest import Victim


class PolicyChoice(NamedTuple):
    """One policy, migration planner or order of service, before it is created.

    Attributes:
        label: what reports call it.
        name: it is registered under.
        options: of its constructor.
    """

    label: str
    name: str
    options: dict[str, Any]

    @property
    def plain(self) -> dict[str, Any]:
        """The choice as a configuration has it."""
        return {"name": self.name, "label": self.label, **self.options}


class CandidateChoice(NamedTuple):
    """What a simulation compares with others: a routing policy, a planner and an order.

    Attributes:
        label: of those that vary.
        policy: places requests.
        planner: moves them.
        order: in which they are served.
    """

    label: str
    policy: PolicyChoice
    planner: PolicyChoice
    order: PolicyChoice


def policy_choices(
    policies: str | list[str | dict[str, Any]], key: str = "policies"
) -> list[PolicyChoice]:
    """Return the policies, each with a label of its own.

    Args:
        policies: names with commas between them; or a list of names and of
            ``{name, label, ...options}``.
        key: of the configuration, for errors.

    Raises:
        ValueError: none, one without a name, or two with one label.
    """
    given: list[str | dict[str, Any]]
    if isinstance(policies, str):
        given = list(filter(None, map(str.strip, policies.split(","))))
    else:
        given = policies
    choices: list[PolicyChoice] = []
    for i, entry in enumerate(given):
        options = {"name": entry} if isinstance(entry, str) else dict(entry)
        name = options.pop("name", None)
        label = options.pop("label", name)
        if not isinstance(name, str) or not isinstance(label, str):
            raise ValueError(f"{key}.{i}: a policy's name, or {{name: ..., label: ...}}")
        if any(label == choice.label for choice in choices):
            raise ValueError(f"{key}.{i}.label: there already is a policy {label!r}")
        choices.append(PolicyChoice(label, name, options))
    if not choices:
        raise ValueError(f"{key}: at least one")
    return choices


T = TypeVar("T")

_POOL = 256
"""Requests that wait with `headway serve` by default."""


@dataclass(frozen=True)
class _Section(Checked):
    """A part of a configuration, whose key is its class's name."""

    def _section(self) -> str:
        return f"{type(self).__name__.removesuffix('Config').lower()}."


@dataclass(frozen=True)
class ClusterConfig(
    _Section,
    instances=COUNT,
    slots=COUNT,
    kv_capacity=COUNT,
    block_tokens=NOT_NEGATIVE,
    dispatch_s=NOT_NEGATIVE,
):
    """The decode instances, all alike.

    Attributes:
        instances: Number of instances, G.
        slots: Requests that an instance decodes at once, B (vLLM's max_num_seqs).
        kv_capacity: Context tokens that an instance's KV cache holds, K. If not set, any number.
        prefix_caching: A preempted request that is admitted again computes only its overwritten
            tokens, as vLLM does by default. Otherwise it computes all of them.
        block_tokens: Tokens of a block of the KV cache. Each request loses half a block on average,
            which policies do not see. So an instance may have to queue what they place there. 0:
            nothing is lost.
        dispatch_s: Seconds from a request's placement until its instance can admit it: the way
            through a proxy and the instance's own server. 0: at once.
        victim: whom an instance suspends when its KV cache is full, as `engine.victim` of a
            deployment: newest, or the request with the longest expected rest (by the forecast, as
            `rest`, or by its age), or with the longest context.
    """

    instances: int = 16
    slots: int = 72
    kv_capacity: int | None = None
    prefix_caching: bool = False
    block_tokens: int = 0
    dispatch_s: float = 0.0
    victim: Victim = "newest"

    @property
    def capacity_tokens(self) -> int:
        """K, or `UNLIMITED`."""
        return int(UNLIMITED) if self.kv_capacity is None else self.kv_capacity


@dataclass(frozen=True)
class PoolConfig(_Section, limit=COUNT):
    """The pool of requests that wait for a place.

    Attributes:
        limit: most requests in it, which is what the policy sees and what is put in order; 256
            if not set, as with `headway serve`. With arrivals of kind revelation, `arrivals.target`
            says it. With instant dispatch there is no limit: a policy is asked about each as it
            comes, or lets them wait.
    """

    limit: int | None = None


@dataclass(frozen=True)
class PrefillConfig(
    _Section,
    instances=COUNT,
    max_batched_tokens=COUNT,
    token_budget=COUNT,
    expected_context=NOT_NEGATIVE,
):
    """Where prompts are computed.

    Attributes:
        kind: none (requests come prefilled), stage (separate instances do it, one request at a
            time), or chunked (each instance mixes chunks of prompts into its decode steps).
        instances: servers of a prefill stage.
        max_batched_tokens: Tokens of a step with chunked prefill, decoded tokens included.
        formation: How a step with chunked prefill is formed. With sarathi, it takes every decode,
            and as many prompt tokens as the token budget leaves. With fairbatching, it takes urgent
            decodes, prompts, other decodes, within the time that the objectives leave. With
            fairbatching_tokens that is a number of tokens, with fairbatching_fixed token_budget.
        token_budget: Token budget of formations that have a fixed one. If not set,
            max_batched_tokens.
        expected_context: context tokens that fairbatching_tokens takes any batch to read, since
            its budget does not see them.
    """

    kind: Literal["none", "stage", "chunked"] = "none"
    instances: int = 1
    max_batched_tokens: int = 2048
    formation: Literal["sarathi", "fairbatching", "fairbatching_tokens", "fairbatching_fixed"] = (
        "sarathi"
    )
    token_budget: int | None = None
    expected_context: int = 0

    def __post_init__(self) -> None:
        """Refuse a prefill that would never end, and chunks where there are none."""
        super().__post_init__()
        if self.kind != "chunked" and (self.formation != "sarathi" or self.token_budget):
            raise ValueError("prefill.formation, prefill.token_budget: of prefill.kind chunked")
        if self.token_budget and self.formation in ("fairbatching", "fairbatching_tokens"):
            raise ValueError(
                f"prefill.token_budget: {self.formation} has none, its budget is the objectives'"
            )
        if self.expected_context and self.formation != "fairbatching_tokens":
            raise ValueError("prefill.expected_context: of prefill.formation fairbatching_tokens")


@dataclass(frozen=True)
class AdmissionConfig(_Section):
    """Which requests an instance turns away as they arrive.

    Attributes:
        pab: Refuse requests whose prompt is beyond an instance's prefill budget, unless it has no
            request at all.
        whole_steps: the budget counts the tokens that fall due, not the paper's fractions.
    """

    pab: bool = False
    whole_steps: bool = True


@dataclass(frozen=True)
class TransferConfig(
    _Section,
    handshake_s=NOT_NEGATIVE,
    gigabits_per_second=POSITIVE,
    bytes_per_token=POSITIVE,
    block_tokens=NOT_NEGATIVE,
):
    """Moving a running request's KV cache from one instance to another.

    Attributes:
        handshake_s: seconds before its first byte.
        gigabits_per_second: Speed of the network between two instances.
        bytes_per_token: Bytes of a token in the KV cache: 2 * layers * KV heads * head size * bytes
            of a number. 131,072 is Llama-3-8B's in 16 bits.
        block_tokens: Tokens of a block of the KV cache. Whole blocks are copied, so a moving
            request decodes on until it has just filled one. 0: it leaves with its next token.
    """

    handshake_s: float = 0.01
    gigabits_per_second: float = 25.0
    bytes_per_token: float = 131_072.0
    block_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Context tokens that the network carries each second."""
        return self.gigabits_per_second * 1e9 / 8 / self.bytes_per_token


@dataclass(frozen=True)
class MigrationConfig(_Section, interval=COUNT):
    """When running requests move to other instances, and who says so.

    Attributes:
        interval: decode steps of the mean instance between two plans.
        planners: to compare, each with every policy: names, or {name, label, ...options}, in a
            list; or names with commas. ``none`` moves nothing. A planner may receive other
            lengths than the policies: {forecast: {name, ...options}}. What the transfer says of
            a move's costs need not be repeated.
    """

    interval: int = 20
    planners: str | list[str | dict[str, Any]] = "none"


@dataclass(frozen=True)
class PowerConfig(
    _Section, gamma=POSITIVE, mfu_sat=POSITIVE, flops_per_token=POSITIVE, peak_flops=POSITIVE
):
    r"""Power of a GPU, :math:`P = P_{idle} + (P_{max} - P_{idle})\,u^\gamma`.

    Attributes:
        idle: watts of a GPU that computes nothing.
        max: watts of a busy one.
        gamma: how power follows utilisation u.
        mfu_sat: model FLOPs utilisation at which power saturates (the reading u = mfu / mfu_sat).
        flops_per_token: FLOPs of generating a token, about twice the model's active parameters.
        peak_flops: FLOPs of a GPU per second. 312e12 is an A100 in BF16.
    """

    idle: float = 100.0
    max: float = 400.0
    gamma: float = 0.7
    mfu_sat: float = 0.45
    flops_per_token: float = 14e9
    peak_flops: float = 312e12

    def __post_init__(self) -> None:
        """Refuse a power that falls with work."""
        super().__post_init__()
        if not 0 <= self.idle <= self.max < math.inf:
            raise ValueError(f"power: 0 <= idle <= max, not {self.idle} and {self.max}")


@dataclass(frozen=True)
class ArrivalsConfig(_Section, target=COUNT, scale=POSITIVE, rate=POSITIVE, cv=POSITIVE):
    """When requests arrive.

    Attributes:
        kind: revelation keeps the pool at `target` (paper 000, always overloaded); trace uses
            the trace's own times; poisson and gamma draw them.
        target: requests of the pool with kind revelation; 4 an instance if not set.
        scale: multiplies the rate of a trace: 2 makes it arrive twice as fast.
        rate: mean requests per second of poisson and gamma.
        cv: coefficient of variation of gamma's gaps; 1 is poisson, more is burstier.
    """

    kind: Literal["revelation", "trace", "poisson", "gamma"] = "revelation"
    target: int | None = None
    scale: float = 1.0
    rate: float = 1.0
    cv: float = 1.0


@dataclass(frozen=True)
class SLOConfig(_Section, ttft_s=POSITIVE, tpot_s=POSITIVE):
    """What counts as served well enough.

    Attributes:
        ttft_s: longest time to the first token, in seconds.
        tpot_s: longest time per output token after it, in seconds.
        tpot: How a request's TPOT is measured. With mean, it is the mean time between its tokens.
            With worst, it is the worst running mean, max over j of (t_j − t_0) / j. With deadline,
            it is the same, but t_0 is the time at which its first token was due. It is then at most
            tpot_s if every token came by its deadline, arrival + ttft_s + j · tpot_s.
        deadlines: Deadlines of tokens after the first, for FairBatching and its budget. With
            arrival they are as above. With first_token they are at t_0 + j · tpot_s, however early
            or late t_0 was.
    """

    ttft_s: float
    tpot_s: float
    tpot: Literal["mean", "worst", "deadline"] = "mean"
    deadlines: Literal["arrival", "first_token"] = "arrival"


@dataclass(frozen=True)
class SimulationConfig(_Section, seeds=COUNT, max_steps=COUNT, max_seconds=POSITIVE):
    """A simulation; every key of its YAML file.

    Attributes:
        cluster: the decode instances.
        clock: barrier (all instances step together, as with expert parallelism) or independent.
        dispatch: With pool, requests wait centrally until a slot is free. With instant, each goes
            to an instance's queue as it arrives, or at the next decision of a policy that decides
            at intervals.
        pool: the pool of requests that wait for a place.
        prefill: where prompts are computed.
        admission: which requests instances turn away.
        batching: which queued request an instance admits next.
        drift: Tokens that a running request's context gains in a step, repeated cyclically.
        step_time: {name: bfio | moe | batch | table | profile, ...options}, seconds of a step.
        power: of a GPU.
        transfer: of a running request to another instance.
        migration: planners that move running requests, and how often they are asked.
        trace: {name, requests, ...options}: a generator, or {path, requests, skip_empty, format,
            time_unit} of a file. Its format (headway, azure, burstgpt, mooncake) is told by its
            first line and its unit of time (s, ms, us, ns) by its format, unless they are given.
        arrivals: when requests arrive.
        forecast: {name, ...options}: the forecasts of output lengths that policies receive.
        policies: names, or {name, label, ...options}, in a list; or names with commas.
        orders: Orders in which the pool is served, as policies. Each runs with every policy and
            planner.
        seeds: runs of each policy, with seeds 0, 1, ...
        slo: {ttft_s, tpot_s} that goodput counts, and that deadlines come from; null leaves it
            out.
        max_steps: stop after this many steps even if requests are left; null runs to the end.
        max_seconds: end at this time of the simulation even if requests are left; null runs to the
            end.
    """

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    clock: Literal["barrier", "independent"] = "barrier"
    dispatch: Literal["pool", "instant"] = "pool"
    pool: PoolConfig = field(default_factory=PoolConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    batching: Literal["fcfs", "bin_packing", "least_work_left"] = "fcfs"
    drift: list[int] = field(default_factory=lambda: [1])
    step_time: dict[str, Any] = field(default_factory=lambda: {"name": "bfio"})
    power: PowerConfig = field(default_factory=PowerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    migration: MigrationConfig = field(default_factory=MigrationConfig)
    trace: dict[str, Any] = field(
        default_factory=lambda: {"name": "burstgpt_like", "requests": 10_000}
    )
    arrivals: ArrivalsConfig = field(default_factory=ArrivalsConfig)
    forecast: dict[str, Any] = field(default_factory=lambda: {"name": "oracle"})
    policies: str | list[str | dict[str, Any]] = "fcfs,jsq"
    orders: str | list[str | dict[str, Any]] = "fcfs"
    seeds: int = 3
    slo: SLOConfig | None = None
    max_steps: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        """Refuse values and combinations that mean nothing, each by its key."""
        super().__post_init__()
        if not self.drift or min(self.drift) < 0:
            raise ValueError(f"drift: at least one number, none below 0, not {self.drift}")
        for key in ("step_time", "forecast"):
            if not isinstance(getattr(self, key).get("name"), str):
                raise ValueError(f"{key}.name is missing: which one?")
        if len({"name", "path"} & set(self.trace)) != 1:
            raise ValueError("trace: give either the name of a generator or the path of a file")
        if self.arrivals.kind == "revelation":
            if self.dispatch == "instant":
                raise ValueError(
                    "dispatch: instant needs arrivals in time, but arrivals.kind is revelation"
                )
            if self.prefill.kind == "stage":
                raise ValueError(
                    "prefill.kind: a stage needs arrivals in time, but arrivals.kind is revelation"
                )
            if self.pool.limit is not None:
                raise ValueError("pool.limit: with arrivals.kind revelation give arrivals.target")
        elif self.arrivals.target is not None:
            raise ValueError("arrivals.target is for arrivals.kind revelation; give pool.limit")
        if self.prefill.formation != "sarathi":
            self._refuse_beside_formation()
        if self.admission.pab and self.dispatch != "instant":
            raise ValueError("admission.pab: of dispatch instant; a pool lets requests wait")
        if self.dispatch == "instant" and any(
            one.name != "fcfs" or one.options.get("fairness") for one in self.order_choices()
        ):
            raise ValueError(
                "orders: with dispatch instant no request waits at the router; choose dispatch: "
                "pool, or leave orders out"
            )
        self.candidate_choices()

    def _refuse_beside_formation(self) -> None:
        """Refuse what is not simulated where decodes may sit a step out."""
        key = f"prefill.formation: {self.prefill.formation}"
        if self.clock != "independent":
            raise ValueError(f"{key} needs clock: independent")
        if self.batching != "fcfs":
            raise ValueError(f"{key} needs batching: fcfs, it has an order of its own")
        if any(choice.name != "none" for choice in self.planner_choices()):
            raise ValueError(f"{key} is not simulated with migration")

    @property
    def pool_limit(self) -> int:
        """P: the revelation target, or the most requests that the policy sees."""
        if self.arrivals.kind == "revelation":
            target = self.arrivals.target
            return 4 * self.cluster.instances if target is None else target
        return _POOL if self.pool.limit is None else self.pool.limit

    def _section(self) -> str:
        return ""

    def policy_choices(self) -> list[PolicyChoice]:
        """Return the policies, as the function of that name does."""
        return policy_choices(self.policies)

    def planner_choices(self) -> list[PolicyChoice]:
        """Return the migration planners, likewise."""
        return policy_choices(self.migration.planners, "migration.planners")

    def order_choices(self) -> list[PolicyChoice]:
        """Return the scheduling orders, likewise."""
        return policy_choices(self.orders, "orders")

    def candidate_choices(self) -> list[CandidateChoice]:
        """Return every policy with every planner and order, named after those that vary."""
        kinds = self.policy_choices(), self.planner_choices(), self.order_choices()
        found = []
        for chosen in product(*kinds):
            varying = [one.label for one, all in zip(chosen, kinds, strict=True) if len(all) > 1]
            found.append(CandidateChoice(", ".join(varying) or chosen[0].label, *chosen))
        return found


def checked(key: str, make: Callable[..., T], options: dict[str, Any]) -> T:
    """Return ``make(**options)``, with errors that begin with the key of the options.

    Raises:
        ValueError: an unknown option, a missing one, or a value that is refused.
    """
    try:
        return make(**options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{key}: {error}") from error


def read_config(values: dict[str, Any]) -> SimulationConfig:
    """Return the simulation that a mapping of keys describes, as a YAML file would.

    Raises:
        ValueError: an unknown key, or a value that its key cannot take.
    """
    parser = _parser()
    try:
        made = parser.instantiate(parser.parse_object(values))
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return SimulationConfig(**{key.name: made[key.name] for key in fields(SimulationConfig)})


@cache
def _parser() -> CommandParser:
    """Return the parser, which takes longer to make than to use."""
    parser = CommandParser(exit_on_error=False)
    parser.add_class_arguments(SimulationConfig)
    return parser
