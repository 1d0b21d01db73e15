"""The methods that STAR's predictor is measured against (Table 1), and two without a model."""

from collections.abc import Callable

from predictor.evaluation.comparators.auxiliary_causal_lm import AuxiliaryCausalLM
from predictor.evaluation.comparators.auxiliary_encoder import AuxiliaryEncoder
from predictor.evaluation.comparators.comparator import Comparator, row_token_ids
from predictor.evaluation.comparators.constant_median import ConstantMedian
from predictor.evaluation.comparators.kaplan_meier import KaplanMeier
from predictor.evaluation.comparators.prompt_self_report import PromptSelfReport
from predictor.evaluation.comparators.regressor import Regressor
from predictor.evaluation.comparators.text_regressor import FineTuning, TextRegressor

__all__ = [
    "COMPARATORS",
    "AuxiliaryCausalLM",
    "AuxiliaryEncoder",
    "Comparator",
    "ConstantMedian",
    "FineTuning",
    "KaplanMeier",
    "PromptSelfReport",
    "Regressor",
    "TextRegressor",
    "row_token_ids",
]

COMPARATORS: dict[str, Callable[..., Comparator]] = {
    "constant_median": ConstantMedian,
    "kaplan_meier": KaplanMeier,
    "regressor": Regressor,
    "regressor_cut_as_ended": Regressor,
    "prompt_self_report": PromptSelfReport,
    "auxiliary_encoder": AuxiliaryEncoder,
    "auxiliary_causal_lm": AuxiliaryCausalLM,
}
"""Comparators by the name they have in tables and on the command line."""
