"""``condenser.yaml`` of an exported policy: the settings of its contexts, and an engine that plays episodes by them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from condensegrpo.assembly.parts import build_condenser, build_sandbox, build_toolbox
from condensegrpo.assembly.runtime import evaluation_temperature, open_sampler
from condensegrpo.assembly.scorers import frozen_model, names_of, open_scorers
from condensegrpo.config.load import validate
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.yaml_tree import apply_overrides, dump, read_yaml
from condensegrpo.episodes.engine import Engine
from condensegrpo.episodes.render import Renderer
from condensegrpo.learner.policy import end_ids, load_tokenizer
from condensegrpo.storage.media import MediaFolder
from condensegrpo.vision.processor import load_picture_processor

CONDENSER = "condenser.yaml"
STAND_IN = "ledger"  # a configuration names a task; an exported policy acts in the world of whoever runs it
ROLLOUT = ("limits", "condense", "tools", "template_options")  # keys of the rollout that shape a context


def exported_settings(config: RunConfig) -> str:
    """The YAML text of the settings that shape the contexts of a policy, under the keys of a configuration."""
    tree = config.model_dump(mode="json")
    rollout = {key: tree["rollout"][key] for key in ROLLOUT}
    rollout["temperature"] = evaluation_temperature(config)
    return dump({"condenser": tree["condenser"], "rollout": rollout})


@contextmanager
def open_engine(folder: Path | str, overrides: Sequence[str] = ()) -> Iterator[Engine]:
    """The trajectory engine of an exported policy: its weights, condenser, tools and limits.

        with open_engine("exported") as engine:
            trajectory = await run_episode(problem, environment=…, engine=engine, …)

    Args:
        folder: what ``condensegrpo export`` wrote.
        overrides: ``key=value``, such as ``sampler.name=vllm``.

    Raises:
        ConfigError: the folder has no such file, or a setting does not work here, such as a tool without its data.
    """
    settings = read_yaml(Path(folder) / CONDENSER)
    tree = {"model": {"path": str(folder)}, "task": {"name": STAND_IN}, **settings}
    config = validate(apply_overrides(tree, overrides), source=str(Path(folder) / CONDENSER))
    condenser = build_condenser(config.condenser)
    toolbox = build_toolbox(config, build_sandbox(config), condenser)
    source, rollout = str(config.model.path), config.rollout
    with ExitStack() as opened:
        media = MediaFolder(Path(opened.enter_context(TemporaryDirectory(prefix="condensegrpo-media-"))))
        renderer = Renderer(
            load_tokenizer(source),
            tools=toolbox.template_schemas,
            tool_format=toolbox.format,
            template_options=rollout.template_options,
            stop_ids=end_ids(source),
            pictures=load_picture_processor(source, media),
        )
        sampler = open_sampler(config, source, media=media)
        opened.callback(sampler.close)
        model = partial(frozen_model, dtype=config.model.dtype)
        yield Engine(
            sampler=sampler,
            renderer=renderer,
            condenser=condenser,
            condenser_name=config.condenser.name,
            scorers=open_scorers(names_of(condenser), sampler=sampler, renderer=renderer, model=model),
            trigger=rollout.condense,
            toolbox=toolbox,
            limits=rollout.limits,
            temperature=rollout.temperature,
        )
