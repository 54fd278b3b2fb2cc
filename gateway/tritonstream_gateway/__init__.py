"""Tritonstream's gateway: OpenAI's HTTP API over a model behind Triton.

A request is read and checked (routes.py, schema.py), admitted (keys.py, ledger.py), spelled as one of the client
library (translate.py), sent to Triton (upstream.py, http2.py), and its deltas are written as OpenAI does (events.py,
whole.py). The gateway only translates: prompts, templates, tokens and parsers are the served model's.
"""
