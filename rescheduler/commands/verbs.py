"""The verbs of ``headway``: what each does, an example, and where its function is."""

from typing import NamedTuple


class Verb(NamedTuple):
    """A verb.

    Attributes:
        function: ``module:name``, loaded when the verb is used, or empty where a name must follow.
        text: what it does, in the imperative.
        example: a command that works in a clone, or with the reader's own files.
    """

    function: str
    text: str
    example: str = ""


_DATASET = "data_collection.dataset"
_LIGHTNING = "rescheduler.commands.train:train"
_RAY = "rescheduler.on_ray"
_STUDIES = "rescheduler.papers.studies"
_FIT = "--config survival --data.dataset runs/demo"

VERBS = {
    "doctor": Verb(
        "rescheduler.doctor.doctor:doctor",
        "check the installation, or show a running engine's forecasts",
        "headway doctor --model smollm2",
    ),
    "advise": Verb(
        "rescheduler.simulator.advice.advise:advise",
        "simulate your traffic, and say what each policy would gain",
        "headway advise examples/trace.csv --instances 4 --slots 32 --requests 2000",
    ),
    "demo": Verb(
        "rescheduler.demo.demo:demo",
        "show a load with and without moves, a fleet of emulated GPUs, or a log",
        "headway demo --emulate h100x2-llama-70b",
    ),
    "model": Verb(
        "data_collection.models:model",
        "prepare the embedded model, SmolLM2-135M",
        "headway model smollm2",
    ),
    "collect": Verb(
        "data_collection.workload.collect:collect",
        "record hidden states and lengths of a model in vLLM, as a dataset",
        "headway collect runs/demo --config collect/quick",
    ),
    "dataset": Verb("", "inspect, check, merge, export or share datasets"),
    "dataset inspect": Verb(
        f"{_DATASET}.inspect_dataset:inspect",
        "print and plot a dataset's lengths",
        "headway dataset inspect runs/demo",
    ),
    "dataset validate": Verb(
        f"{_DATASET}.validate_dataset:validate",
        "check that a predictor can be trained on a dataset",
        "headway dataset validate runs/demo",
    ),
    "dataset merge": Verb(
        f"{_DATASET}.dataset_commands:merge",
        "merge datasets into a new one",
        "headway dataset merge runs/monday runs/tuesday runs/both",
    ),
    "dataset transcripts": Verb(
        f"{_DATASET}.dataset_commands:export_transcripts",
        "keep prompts and answers, to collect from them again",
        "headway dataset transcripts runs/demo mine.parquet",
    ),
    "dataset push": Verb(
        f"{_DATASET}.share_dataset:push",
        "share a dataset on the Hugging Face Hub",
        "headway dataset push runs/demo me/demo-lengths",
    ),
    "dataset pull": Verb(
        f"{_DATASET}.share_dataset:pull",
        "fetch a dataset from the Hugging Face Hub",
        "headway dataset pull me/demo-lengths runs/pulled",
    ),
    "train": Verb("", "train or share a predictor, or search its hyperparameters"),
    "train fit": Verb(
        _LIGHTNING,
        "train a predictor with Lightning",
        f"headway train fit {_FIT} --out runs/predictor",
    ),
    "train validate": Verb(
        _LIGHTNING,
        "measure a training on the validation part",
        f"headway train validate {_FIT} --ckpt-path runs/predictor/training/last.ckpt",
    ),
    "train test": Verb(
        _LIGHTNING,
        "measure a training on the test part",
        f"headway train test {_FIT} --ckpt-path runs/predictor/training/last.ckpt",
    ),
    "train tune": Verb(
        "predictor.training.tuning:tune",
        "search a predictor's hyperparameters",
        "headway train tune runs/demo --trials 20",
    ),
    "train push": Verb(
        "predictor.training.share_predictor:push",
        "share a predictor on the Hugging Face Hub",
        "headway train push runs/predictor me/demo-predictor",
    ),
    "train pull": Verb(
        "predictor.training.share_predictor:pull",
        "fetch a predictor from the Hugging Face Hub",
        "headway train pull me/demo-predictor runs/pulled",
    ),
    "evaluate": Verb(
        "predictor.evaluation.evaluate:evaluate",
        "measure a predictor's errors, next to simpler ones",
        "headway evaluate runs/demo runs/predictor",
    ),
    "evaluate recalibrate": Verb(
        "rescheduler.monitoring.recalibrate:recalibrate",
        "correct a predictor by requests that it has served",
        "headway evaluate recalibrate runs/predictor finished.jsonl runs/recalibrated",
    ),
    "launch": Verb(
        "rescheduler.engines.launch_engines:launch",
        "start the engines of a deployment, and its proxy",
        "headway launch --config local-pd --serve",
    ),
    "serve": Verb(
        "rescheduler.serving.serve:serve",
        "serve a deployment's engines at one OpenAI-compatible address",
        "headway serve --config local-pd",
    ),
    "batch": Verb(
        "rescheduler.batch.batch:batch",
        "answer a file of requests in the background",
        "headway batch questions.jsonl",
    ),
    "drain": Verb(
        "rescheduler.serving.admin_client:drain",
        "move all requests away from an instance, before it is stopped",
        "headway drain decode-0 --config local-pd",
    ),
    "coordinator": Verb(
        "rescheduler.coordinator.coordinator:coordinator",
        "place and move the requests of many proxies",
        "headway coordinator --config my-deployment.yaml",
    ),
    "picker": Verb(
        "rescheduler.gateway.picker_command:picker",
        "choose engines for an Envoy gateway, instead of a proxy",
        "headway picker --config local-replicas",
    ),
    "ray": Verb("", "launch, show, restart or stop a deployment on a Ray cluster"),
    "ray launch": Verb(
        f"{_RAY}.launch_on_ray:launch",
        "start a deployment on a Ray cluster",
        "headway ray launch --config my-ray.yaml",
    ),
    "ray status": Verb(
        f"{_RAY}.launch_on_ray:status",
        "show what runs on the Ray cluster",
        "headway ray status",
    ),
    "ray restart": Verb(
        f"{_RAY}.launch_on_ray:restart",
        "restart a deployment's engines, one by one",
        "headway ray restart --only decode-0",
    ),
    "ray stop": Verb(
        f"{_RAY}.launch_on_ray:stop",
        "stop the deployment on the Ray cluster",
        "headway ray stop",
    ),
    "keys": Verb(
        "predictor.live.zmq_sockets:keys",
        "create keys for telemetry between machines",
        "headway keys runs/keys",
    ),
    "simulate": Verb(
        "rescheduler.simulator.simulate:simulate",
        "compare policies and settings on a simulated cluster",
        "headway simulate --config bfio_table1",
    ),
    "rehearse": Verb(
        "rescheduler.demo.rehearse:rehearse",
        "serve a trace with emulated GPUs and the real vLLM",
        "headway rehearse examples/trace.csv --config local-pd --emulate h100-llama-8b",
    ),
    "profile": Verb(
        "rescheduler.profiling.profile_command:profile",
        "measure how long an engine's steps take on this machine",
        "headway profile runs/profile --model smollm2",
    ),
    "papers": Verb("", "reproduce the papers' figures, tables and models"),
    "papers scaling": Verb(
        f"{_STUDIES}.scaling:scaling",
        "measure imbalance by workers and batches (BF-IO)",
        "headway papers scaling --config bfio_theory --out runs/bfio_theory",
    ),
    "papers barrier-tax": Verb(
        f"{_STUDIES}.barrier_tax:barrier_tax",
        "compare routing by models of a step's time (EP barrier tax)",
        "headway papers barrier-tax --config barrier_tax --out runs/barrier_tax",
    ),
    "papers rescheduling": Verb(
        f"{_STUDIES}.rescheduling:rescheduling",
        "compare migration planners (STAR)",
        "headway papers rescheduling --config star_two --out runs/star_two",
    ),
    "papers fairbatching": Verb(
        f"{_STUDIES}.fairbatching:fairbatching",
        "count the requests in time (FairBatching)",
        "headway papers fairbatching --config fairbatching_node --out runs/node",
    ),
    "papers train-router": Verb(
        "rescheduler.papers.jain_router.train_router:train_routers",
        "train routers, and compare them (Jain et al.)",
        "headway papers train-router --config rl/quick --out runs/rl",
    ),
    "papers train-length": Verb(
        "rescheduler.papers.prompt_length.train_length:train_length",
        "predict lengths from prompts (Jain et al.)",
        "headway papers train-length runs/demo prompts.jsonl",
    ),
}
"""What ``headway`` does: verbs, and verbs with a name that follows them."""

GROUPS = {
    "doctor": "Start here",
    "model": "Data and predictors",
    "launch": "Serve",
    "simulate": "Plan",
    "papers": "Research",
}
"""What the help says above a verb."""


def example_of(prog: str) -> str:
    """Return the example of ``headway VERB``, or nothing where there is none."""
    verb = VERBS.get(prog.removeprefix("headway "))
    return verb.example if verb else ""


def following(name: str) -> dict[str, Verb]:
    """Return the verbs, or those that may follow one."""
    start = f"{name} " if name else ""
    rest = {key.removeprefix(start): verb for key, verb in VERBS.items() if key.startswith(start)}
    return {key: verb for key, verb in rest.items() if " " not in key}
