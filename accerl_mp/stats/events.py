"""TensorBoard's event records, built from its own protocol buffers: scalars, texts, histograms, flags, the overview's layout."""

import io
import math
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as flags_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from accerl_mp.stats.tags import X_AXES, lookup

MAX_BINS = 30

OVERVIEW: dict[str, dict[str, list[str]]] = {
    "The policy": {
        "win rate": ["TextWorld/WinRate", "Eval/WinRate"],
        "normalised score": ["TextWorld/NormalizedScore$", "Eval/NormalizedScore"],
        "invalid replies": ["TextWorld/InvalidActionRate", "Eval/InvalidActionRate"],
        "distance of sampling and training policy": ["KL/OldNewK3TokenMean", "KL/TrainerInferK3", "KL/RefK3TokenMean"],
        "entropy": ["Train/Entropy"],
    },
    "The machine": {
        "tokens a second": ["Train/TokensPerSec", "Infer/TokensPerSec"],
        "policy lag": ["Replay/TrainSampleTrainerVersionLagMean", "Replay/PolicyLagOldestM.*"],
        "time of the trainer": ["Time/trainer/.*"],
        "time of the rollouts": ["Time/rollout/.*"],
        "standstill of a push": ["Sync/ElapsedSeconds"],
    },
}
"""The Custom Scalars tab: what to look at first. Category: chart: tags, as regular expressions."""

HEADLINES = ("Eval/WinRate", "TextWorld/WinRate", "TextWorld/InvalidActionRate", "Train/TokensPerSec", "Infer/TokensPerSec")
"""Columns of the HParams tab beside the flags."""


def scalar_events(step: int, time_s: float, values: Mapping[str, float]) -> list[Event]:
    """One event for each x axis."""
    by_step: dict[int, list[Summary.Value]] = {}
    for tag, value in values.items():
        row = lookup(tag)
        axis = step if row is None or row.x_axis == "step" else values.get(X_AXES[row.x_axis])
        if axis is not None:
            by_step.setdefault(int(axis), []).append(Summary.Value(tag=tag, simple_value=value))
    return [Event(wall_time=time_s, step=at, summary=Summary(value=points)) for at, points in by_step.items()]


def text_event(tag: str, text: str, *, step: int) -> Event:
    """Markdown, for the Text tab."""
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[_shown(text).encode()], tensor_shape=shape)
    return _event(Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]), step=step)


def histogram_event(step: int, time_s: float, counted: Mapping[str, Mapping[int, int]]) -> Event:
    """`counted`: for each histogram how often each whole number came."""
    points = [Summary.Value(tag=tag, histo=_histogram(counts)) for tag, counts in counted.items() if counts]
    return Event(wall_time=time_s, step=step, summary=Summary(value=points))


def flag_events(flat: Mapping[str, Any], *, started_s: float) -> list[Event]:
    """The run's settings: a table for the Text tab, and a row of the HParams tab."""
    return [text_event("run/flags", flags_as_markdown(flat), step=0), *_hparams(flat, started_s)]


def flags_as_markdown(flat: Mapping[str, Any]) -> str:
    """The run's settings as a Markdown table, for TensorBoard."""
    rows = [f"| `--{name.replace('_', '-')}` | `{value}` |" for name, value in flat.items()]
    return "\n".join(["| flag | value |", "|---|---|", *rows])


def layout_event() -> Event:
    """OVERVIEW, for the Custom Scalars tab."""
    categories = [
        layout_pb2.Category(title=title, chart=[_chart(name, tags) for name, tags in charts.items()]) for title, charts in OVERVIEW.items()
    ]
    layout = layout_pb2.Layout(category=categories)
    tensor = TensorProto(dtype=DT_STRING, string_val=[layout.SerializeToString()])
    metadata = layout_metadata.create_summary_metadata()
    return _event(Summary(value=[Summary.Value(tag=layout_metadata.CONFIG_SUMMARY_TAG, metadata=metadata, tensor=tensor)]), step=0)


def as_records(events: list[Event]) -> bytes:
    """As they stand in an event file."""
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()


def _chart(title: str, tags: list[str]) -> layout_pb2.Chart:
    return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))


def _histogram(counts: Mapping[int, int]) -> HistogramProto:
    """A bin for each whole number, or MAX_BINS of one width where there are more. A limit is the upper end of its bin."""
    low, high, num = min(counts), max(counts), sum(counts.values())
    width = max(1, math.ceil((high - low + 1) / MAX_BINS))
    buckets = [0] * ((high - low) // width + 1)
    for value, count in counts.items():
        buckets[(value - low) // width] += count
    limits = [low + width * (index + 1) for index in range(len(buckets))]
    total = sum(value * count for value, count in counts.items())
    squares = sum(value * value * count for value, count in counts.items())
    return HistogramProto(min=low, max=high, num=num, sum=total, sum_squares=squares, bucket_limit=limits, bucket=buckets)


def _hparams(flat: Mapping[str, Any], started_s: float) -> list[Event]:
    start = plugin_data_pb2.SessionStartInfo(group_name=str(int(started_s)), start_time_secs=started_s)
    for name, value in flat.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, (int, float)):
            start.hparams[name].number_value = value
        else:
            start.hparams[name].string_value = "" if value is None else _shown(str(value))
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in HEADLINES]
    infos = [api_pb2.HParamInfo(name=name, type=_hparam_type(value)) for name, value in flat.items()]
    contents = {
        flags_metadata.EXPERIMENT_TAG: plugin_data_pb2.HParamsPluginData(
            experiment=api_pb2.Experiment(hparam_infos=infos, metric_infos=metrics, time_created_secs=started_s)
        ),
        flags_metadata.SESSION_START_INFO_TAG: plugin_data_pb2.HParamsPluginData(session_start_info=start),
    }
    values = [
        Summary.Value(tag=tag, metadata=flags_metadata.create_summary_metadata(content), tensor=flags_metadata.NULL_TENSOR)
        for tag, content in contents.items()
    ]
    return [_event(Summary(value=[value]), step=0) for value in values]


def _shown(text: str) -> str:
    """Names of files need not be UTF-8; what TensorBoard reads must be."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _hparam_type(value: Any) -> int:
    if isinstance(value, bool):
        return api_pb2.DATA_TYPE_BOOL
    return api_pb2.DATA_TYPE_FLOAT64 if isinstance(value, (int, float)) else api_pb2.DATA_TYPE_STRING


def _event(summary: Summary, *, step: int) -> Event:
    return Event(wall_time=time.time(), step=step, summary=summary)
