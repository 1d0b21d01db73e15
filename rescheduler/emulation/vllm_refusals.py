"""What requests to an emulated engine are refused for, before vLLM accepts them."""

from vllm import SamplingParams

from data_collection.vllm_adapter.emulated_runner import RefusedParameters
from rescheduler.emulation.scripted_answers import refuse_unscripted


class RefusedRequests(RefusedParameters):
    """Refuses what scripted answers cannot heed, and scripts that cannot be.

    Given to vLLM as ``--logits-processors``.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request whose answer cannot be emulated; its client gets status 400.

        Raises:
            ValueError: names what is wrong.
        """
        super().validate_params(sampling_params)
        refuse_unscripted(sampling_params.extra_args or {})
