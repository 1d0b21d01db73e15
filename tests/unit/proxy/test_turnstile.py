"""A burst is let in a few at a time, in order, and nobody is lost."""

import asyncio

from rescheduler.serving.turnstile import Turnstile


def sizes_of_turns(entered: list[int]) -> list[int]:
    """Return a list that gets, with each turn of the loop, how many more have entered."""
    loop, sizes, before = asyncio.get_running_loop(), list[int](), 0

    def look() -> None:
        nonlocal before
        sizes.append(len(entered) - before)
        before = len(entered)
        loop.call_soon(look)

    loop.call_soon(look)
    return sizes


async def test_a_burst_is_let_in_a_few_at_a_turn_in_its_order() -> None:
    turnstile, entered = Turnstile(), list[int]()
    sizes = sizes_of_turns(entered)

    async def enter(i: int) -> None:
        await turnstile.enter("a")
        entered.append(i)

    await asyncio.gather(*(enter(i) for i in range(200)))
    assert entered == list(range(200))
    assert max(sizes) <= 32, "so that others have their turn between them"


async def test_who_leaves_holds_back_nobody() -> None:
    turnstile = Turnstile()
    tasks = [asyncio.create_task(turnstile.enter("a")) for _ in range(100)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(turnstile.enter("a") for _ in range(100)))


async def test_one_alone_does_not_wait() -> None:
    turnstile = Turnstile()
    for _ in range(5):
        entering = turnstile.enter("a")
        try:
            entering.send(None)
        except StopIteration:
            continue
        raise AssertionError("it waits though nobody else came")


async def test_a_burst_of_one_client_does_not_hold_back_another() -> None:
    turnstile, entered = Turnstile(), list[str]()

    async def enter(client: str) -> None:
        await turnstile.enter(client)
        entered.append(client)

    await asyncio.gather(*(enter("many") for _ in range(500)), enter("one"))
    assert entered.index("one") <= 48


async def test_a_turn_ends_sooner_the_longer_those_that_it_lets_in_take() -> None:
    """And they stay in their order."""
    turnstile, entered, loop = Turnstile(), list[int](), asyncio.get_running_loop()
    sizes = sizes_of_turns(entered)

    async def enter(i: int) -> None:
        await turnstile.enter("ab"[i % 2])
        entered.append(i)
        began = loop.time()
        while loop.time() - began < 0.003:
            pass

    await asyncio.gather(*(enter(i) for i in range(60)))
    assert entered == list(range(60))
    assert max(sizes) <= 4
