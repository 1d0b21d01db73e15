"""All that Headway reads and changes inside vLLM 0.29 to 0.33, a module a concern.

`tests/integration/test_vllm_contract.py` names everything that is used here, so that another
version fails there and says which one moved.
"""
