"""What a client reads through the proxy, beside what vLLM's own server tells it.

    python -m benchmarks.equality [--config FILE] [--json OUT] [--page docs/equality.md]

Every request of `benchmarks/equality/cases.py` is sent to the proxy of a deployment that runs and
to its first decode engine, with `openai`'s client where it can express it. Statuses, headers that
matter, bodies and streams must be the same, but for names, times and the chunks into which a stream
is cut; whatever is not must have a reason in `benchmarks/equality/reasons.py`. The status is 1 if
something has none.
"""

import asyncio
import sys
from pathlib import Path

import msgspec

from benchmarks.equality.cases import CASES
from benchmarks.equality.comparing import compare
from benchmarks.equality.reasons import explained, table
from benchmarks.support.report import arguments, with_tables, write_report
from data_collection.files import write_text_atomically
from rescheduler.engines.deployment import read_deployment


def main() -> int:
    parser = arguments("what clients read through the proxy, and directly", quick=False)
    parser.prog = "python -m benchmarks.equality"
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("configs/serve/local-pd.yaml"),
        help="a deployment that runs, with its proxy",
    )
    parser.add_argument("--page", type=Path, help="write the table into this page")
    options = parser.parse_args()
    deployment = read_deployment(options.config)
    found = asyncio.run(compare(CASES, deployment.decode[0].url, deployment.proxy_url))
    differences = explained(found)
    text = table(len(CASES), differences)
    print(text)
    if options.page is not None:
        page = with_tables(options.page.read_text(), {"equality": text})
        write_text_atomically(options.page, page)
    write_report(
        "equality",
        {"cases": len(CASES), "alike": len(CASES) - len(differences)},
        options.json,
        differences=[msgspec.to_builtins(one) for one in differences],
    )
    return int(any(not one.reason for one in differences))


if __name__ == "__main__":
    sys.exit(main())
