"""The arguments of ``knit replay``. Imports nothing: the command line is put together before it is needed."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "what an admission policy would do on a recorded or synthetic trace"
EPILOG = """\
  knit replay --preset paper --policy all --json r.json
  knit replay --preset paper --policy progressive --schedule 0,0,.5,1 --chunks 5
  knit replay --trace runs/my-run/events.jsonl --figures figures

The buffer that decides is the one of knit train; rollout, training and publishing are simulated (docs/admission.md).
A trace is JSONL: {"source": "math", "duration": 812.5} per rollout, or the events.jsonl of a run; with the run's
config.yaml beside it, its settings are taken over.
Exit codes: 0 done, 1 a replay stands still, 2 the input is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is replayed")
    what.add_argument(
        "--preset", choices=["paper", "continuous", "stress"], help="sources, batch, engines and launching"
    )
    what.add_argument("--trace", type=Path, metavar="FILE", help="rollouts from a file; the preset gives the rest")
    what.add_argument("--policy", default="all", metavar="NAMES", help="all, or names with commas (default: all)")
    what.add_argument("--placement", choices=["disaggregated", "colocated"], default="disaggregated")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="first seed of a synthetic trace")
    what.add_argument("--seeds", type=int, metavar="N", help="synthetic traces to average over")
    what.add_argument("--batches", type=int, metavar="N", help="train batches per replay")
    what.add_argument("--warm-up", type=int, metavar="N", help="first batches that the means leave out")

    admission = parser.add_argument_group("admission")
    admission.add_argument("--size", type=int, metavar="N", help="trajectories per train batch")
    admission.add_argument("--mini-batches", type=int, metavar="N")
    admission.add_argument(
        "--chunks", type=int, metavar="N", help="parts in which a mini-batch is admitted and trained"
    )
    admission.add_argument("--group-size", type=int, metavar="N", help="rollouts per prompt")
    admission.add_argument("--ratio", action="append", metavar="SOURCE=SHARE", help="quota of a source; repeat it")
    admission.add_argument("--schedule", metavar="S", help="linear, relaxed, end, power:P or coefficients: 0,0,.5,1")
    admission.add_argument("--selection", metavar="NAME", help="oldest, fifo or longest")
    admission.add_argument("--max-ahead", type=float, metavar="B", help="train batches beyond what training needs next")
    admission.add_argument("--max-staleness", type=int, metavar="N", help="bound on trajectory staleness")

    cluster = parser.add_argument_group("simulated cluster")
    cluster.add_argument(
        "--rho",
        type=float,
        nargs="+",
        metavar="SHARE",
        help="training time as share of the step time of rollout alone, the main one first (.67 .95, or as recorded)",
    )
    cluster.add_argument("--train-s", type=float, metavar="S", help="training time of a train batch, instead of --rho")
    cluster.add_argument("--launch", choices=["step", "continuous"], help="when new rollouts start")
    cluster.add_argument("--slots", type=int, metavar="N", help="rollouts that the engines run at once")
    cluster.add_argument("--max-outstanding", type=int, metavar="N", help="rollouts launched and not yet published")
    cluster.add_argument("--slowdown", type=float, metavar="G", help="speed is (1+G)/(1+G·running/slots)")
    cluster.add_argument("--publish-s", type=float, metavar="S", help="pause of generation for a publish")

    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    output.add_argument("--figures", type=Path, metavar="DIR", help="also draw PNG figures into DIR (needs matplotlib)")
