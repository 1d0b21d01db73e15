"""Measured comparisons: each module is a command that prints a table and writes JSON.

Some questions were answered once. What answered them is to be found at commit ce1fa2d:
cpu_executor, expected_load, fitted_rescheduling, large_dataset_memory, lookahead,
predictor_inputs, router_environment, shipped_prompts and tracing; and at commit ff669b2:
barrier, bfio_solver, budget_routing_live and prompt_forecasts; and at commit fe3d431:
emulator_real, live_rescheduling, page_picture, picker_overhead and scaling. What
capture_overhead, live_prediction and gpu_cost measured, engine_cost measures with
``--layer 0``; what room, order and forecast_value did, worth.
"""
