"""The prefill budget that an instance reports with every batch, and what goes by it."""

from predictor.compilation import compiled_core, compiled_inline
from rescheduler.batching.prefill_budget import prefill_budget
from rescheduler.simulator.engine.batch_arrays import BatchArrays
from rescheduler.simulator.engine.batch_choice import slack_of
from rescheduler.simulator.engine.engine_state import MIGRATED, NONE, Cluster, Rules
from rescheduler.simulator.engine.slots import occupied

__all__ = ["report_budget", "turns_away"]


@compiled_core
def report_budget(rules: Rules, cluster: Cluster, batch: BatchArrays, g: int) -> None:
    """Set an instance's budget as of the step that it is about to compose, see `prefill_budget`.

    Until the next report, prompts placed there are subtracted from it where they are placed.
    """
    instance = cluster.instances[g]
    n = 0
    for slot in range(instance.decoding):
        row = cluster.slot_request[g, slot]
        request = cluster.requests[row]
        generated = request.output - (cluster.slot_end[g, slot] - instance.steps)
        context = request.context + instance.grown
        _write(rules, cluster, batch, n, row, generated, context, 0)
        n += 1
    row = instance.filling
    while row != NONE:
        request = cluster.requests[row]
        generated, context = request.generated, request.context
        _write(rules, cluster, batch, n, row, generated, context, request.todo)
        n += 1
        row = request.next
    row = instance.queue_head
    while row != NONE:
        request = cluster.requests[row]
        generated, context = request.generated, request.context
        left = 0 if request.resumes == MIGRATED else context
        _write(rules, cluster, batch, n, row, generated, context, left)
        n += 1
        row = request.next
    service = rules.service
    instance.budget = prefill_budget(
        service.batches,
        service.ttft,
        service.tpot,
        batch.slack[:n],
        batch.context[:n],
        batch.prompt_left[:n],
        service.whole_steps,
    )


@compiled_inline
def _write(
    rules: Rules,
    cluster: Cluster,
    batch: BatchArrays,
    i: int,
    row: int,
    generated: int,
    context: int,
    prompt_left: int,
) -> None:
    batch.slack[i] = slack_of(rules, cluster, row, generated)
    batch.context[i] = context
    batch.prompt_left[i] = prompt_left


@compiled_inline
def turns_away(rules: Rules, cluster: Cluster, row: int, g: int) -> bool:
    """Return whether a prompt is beyond an instance's budget; an empty instance takes any."""
    if not rules.service.admits or occupied(cluster, g) == 0:
        return False
    return cluster.instances[g].budget < cluster.requests[row].prompt  # type: ignore[no-any-return]
