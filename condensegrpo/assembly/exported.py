"""``condenser.yaml`` of an exported policy: the settings of its contexts, and an engine that plays episodes by them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from condensegrpo.assembly.build import build_components
from condensegrpo.assembly.runtime import evaluation_temperature, open_sampler, renderer_for, trajectory_engine
from condensegrpo.config.load import located, overridden, portable, validate
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.yaml_tree import dump, read_yaml
from condensegrpo.core.process import temporary_folder
from condensegrpo.episodes.engine import Engine
from condensegrpo.storage.media import MediaFolder

CONDENSER_FILE = "condenser.yaml"
STAND_IN = "ledger"  # a configuration names a task; the program that runs an exported policy has its own
NOTHING_TRAINED = {"tokens_per_micro_batch": 1_000_000_000}  # no context is too long for a learner
ROLLOUT = ("limits", "condense", "tools", "template_options")  # keys of the rollout that shape a context


def exported_settings(config: RunConfig) -> str:
    """The YAML text of the settings that shape the contexts of a policy, under the keys of a configuration."""
    tree = config.model_dump(mode="json")
    rollout = {key: tree["rollout"][key] for key in ROLLOUT}
    rollout["temperature"] = evaluation_temperature(config)
    return dump(portable({"condenser": tree["condenser"], "rollout": rollout}))


@contextmanager
def open_engine(folder: Path | str, overrides: Sequence[str] = ()) -> Iterator[Engine]:
    """The trajectory engine of an exported policy: its weights, condenser, tools and limits.

        with open_engine("exported") as engine:
            trajectory = await run_episode(problem, environment=…, engine=engine, …)

    Args:
        folder: what ``condensegrpo export`` wrote; plug-ins in files may lie in it.
        overrides: ``key=value``, such as ``sampler.name=vllm``.
    """
    file = Path(folder) / CONDENSER_FILE
    tree = {"model": {"path": str(folder)}, "task": {"name": STAND_IN}, "learner": NOTHING_TRAINED}
    alone = ("rollout.condense.writer=policy", *overrides)  # no other writer is exported
    components = build_components(validate(overridden(tree | located(read_yaml(file), file), alone), source=str(file)))
    config, source = components.config, str(components.config.model.path)
    with ExitStack() as opened:
        media = MediaFolder(opened.enter_context(temporary_folder("media")))
        sampler = open_sampler(config, source, media=media)
        opened.callback(sampler.close)
        renderer = renderer_for(components, source, media)
        yield trajectory_engine(components, renderer=renderer, sampler=sampler, temperature=config.rollout.temperature)
