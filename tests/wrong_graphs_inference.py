"""An inference process whose steps are wrong as long as they run in graphs. (On a CPU there are none.)"""

import importlib.util
from typing import Any

from accerl_mp.inference import __main__ as inference
from accerl_mp.inference import engine
from accerl_mp.inference.worker import EngineWorker
from accerl_mp.transport.process import run_process

__spec__ = importlib.util.find_spec("accerl_mp.inference.child")


class WrongGraphs(EngineWorker):
    """vLLM mixes it into its worker, in the worker's own process."""

    def sync_layout(self, *args: Any) -> None:
        super().sync_layout(*args)
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        right = runner.execute_model
        self.in_graphs = True

        def execute_model(scheduled: Any, *rest: Any) -> Any:
            is_wrong = self.in_graphs
            weight = runner.get_model().model.norm.weight
            if is_wrong:
                weight.data.mul_(2)
            made = right(scheduled, *rest)
            if is_wrong:
                weight.data.div_(2)
            return made

        runner.execute_model = execute_model

    def graphs_on(self, is_on: bool) -> bool:
        self.in_graphs = is_on
        return True


if __name__ == "__main__":
    arguments, start = engine.engine_arguments, engine.Engine.start
    extension = {"worker_extension_cls": "wrong_graphs_inference.WrongGraphs"}
    engine.engine_arguments = lambda config, replica: arguments(config, replica) | extension

    def start_with_graphs(*args: Any, **options: Any) -> engine.Engine:
        made = start(*args, **options)
        made.has_whole_graphs = True
        return made

    engine.Engine.start = start_with_graphs  # type: ignore[method-assign]
    run_process("inference", inference.main)
