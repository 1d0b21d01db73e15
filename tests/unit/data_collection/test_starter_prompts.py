from collections import Counter

from data_collection.workload.starter_prompts import starter_prompts


def test_there_are_500_distinct_prompts() -> None:
    prompts = starter_prompts()
    assert len(prompts) >= 500
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    assert len({prompt["prompt"] for prompt in prompts}) == len(prompts)
    assert all(set(prompt) == {"id", "prompt", "source", "task"} for prompt in prompts)
    assert {prompt["source"] for prompt in prompts} == {"starter"}


def test_no_template_is_left_unfilled() -> None:
    assert not any("{" in prompt["prompt"] for prompt in starter_prompts())


def test_tasks_are_varied() -> None:
    tasks = Counter(prompt["task"] for prompt in starter_prompts())
    assert len(tasks) >= 15
    assert max(tasks.values()) < 0.15 * tasks.total()


def test_every_stretch_of_100_covers_most_tasks() -> None:
    tasks = [prompt["task"] for prompt in starter_prompts()]
    for start in range(len(tasks) - 100):
        assert len(set(tasks[start : start + 100])) > 0.8 * len(set(tasks))


def test_short_and_long_answers_are_asked_for() -> None:
    texts = " ".join(prompt["prompt"] for prompt in starter_prompts())
    assert "one word" in texts
    assert "at least 800 words" in texts


def test_ids_are_readable_and_the_order_stays() -> None:
    assert starter_prompts() == starter_prompts()
    by_id = {prompt["id"]: prompt["prompt"] for prompt in starter_prompts()}
    assert by_id["count-007"] == "Count from 1 to 100, separated by commas."
    assert starter_prompts()[0]["id"] == "definition-032"
