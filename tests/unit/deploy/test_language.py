"""The check of sentences in pages and help texts."""

import json

from deploy import language


def test_a_long_sentence_and_a_listed_phrase_are_faults() -> None:
    page = f"# Title\n\nShort. A{' word' * 31}.\n\n- One is here, so that another is.\n"
    long, phrase = language.faults_of(language.sentences(page))
    assert long.startswith("32 words: A word") and phrase.startswith("so that: One is here")


def test_code_links_and_comments_are_not_counted() -> None:
    code = "```\n" + "word " * 40 + "\n```\n"
    comment = f"<!-- {'word ' * 40} -->\n"
    inline = f"See `{'word ' * 40}` and [a page]({'x' * 20}).\n"
    table = "| a | b |\n|---|---|\n| " + " | ".join(["four words in here"] * 10) + " |\n"
    assert not language.faults_of(language.sentences("\n".join((code, comment, inline, table))))


def test_what_is_allowed_can_only_fall() -> None:
    allowed = json.loads((language._ALLOWED).read_text())
    assert {file: len(lines) for file, lines in language.found().items()} == allowed
