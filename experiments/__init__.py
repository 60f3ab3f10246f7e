"""The paper's tables, re-run: `python -m experiments NAME`, from a checkout.

A module for each table, with `run(quick) -> Result` and `plot(result) -> Figure`. Each prints the paper's value beside
ours and writes `NAME.json` and `NAME.svg`.
"""
