"""All that Headway reads and changes inside vLLM, a module a concern; written against vLLM 0.32.

`tests/integration/test_vllm_contract.py` names everything that is used here, so that another
version fails there and says which one moved.
"""
