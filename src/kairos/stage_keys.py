"""Fields and code that decide the results of a stage of the table `kairos.stages`.

`select_fields` returns the fields, and `hash_stage_code` hashes the code.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kairos.code_hash import hash_code
from kairos.library_components import LibraryComponent
from kairos.stages import LEFT_OUT, TRAIN, Stage

if TYPE_CHECKING:
    from kairos.components import ComponentOptions
    from kairos_timesteps.registry import Registry

Sections = Mapping[str, Any]  # sections of an experiment by name, see `list_sections`
Fields = dict[str, Any]  # fields of an experiment as JSON values


def list_sections(experiment: Any, stage: Stage, method: str | None = None) -> Sections:
    """Return the sections of an experiment by name, and ``method`` and ``analysis`` of a job of the stage.

    Args:
        experiment: the resolved experiment, an `Experiment`.
        stage: the stage.
        method: name of the job's method; None: the fields of the stage do not depend on the method.
    """
    sections = {name: getattr(experiment, name) for name in type(experiment).model_fields}
    if method is not None:
        sections["method"] = experiment.methods[method]
    for analysis in experiment.analyses:
        if stage.name in (f"measure_{analysis.name}", f"analyse_{analysis.name}"):
            sections["analysis"] = analysis
    return sections


def select_fields(stage: Stage, sections: Sections) -> Fields:
    """Return the fields that the results of a stage depend on, nested as in the experiment, with JSON values."""
    names = [name for name in sections if name != "method"] if stage.fields == ("*",) else stage.fields
    no_effect = set(stage.no_effect)
    if stage.name == TRAIN.name and sections["method"].coupling.facts.get("by_rank"):
        no_effect.discard("training.processes")  # each process couples its slice of the batch
    fields: Fields = {}
    for name in names:
        section, _, entry = name.partition(".")
        if name in no_effect:
            continue
        value = _dump(sections[section])
        if entry:
            fields.setdefault(section, {})[entry] = value[entry]
        elif isinstance(value, dict):
            fields[section] = {key: item for key, item in value.items() if f"{section}.{key}" not in no_effect}
        else:
            fields[section] = value
    if "schedule" in fields.get("training", {}):
        fields["training"]["schedule"] = resolve_schedule(_dump(sections["training"]))
    return fields


def resolve_schedule(training: Fields) -> Fields:
    """Return the schedule of section `training`, with the last milestone as the length if option `length` is None.

    The milestone is not converted to steps, so ``10 epochs`` differs from the equal number of steps.
    """
    schedule: Fields = training["schedule"]
    is_open = "length" in schedule and schedule["length"] is None
    return {**schedule, "length": training["milestones"][-1]} if is_open else schedule


def _dump(value: Any) -> Any:
    """Return sections and components, also in lists and dictionaries, as JSON values."""
    if isinstance(value, LibraryComponent):
        return value.plain()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {name: _dump(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_dump(item) for item in value]
    return value


def hash_stage_code(stage: Stage, sections: Sections) -> str:
    """Return the hash of the code that computes the results of a stage."""
    return hash_modules(list_modules(stage, sections))


def hash_modules(modules: Iterable[str]) -> str:
    """Return the hash of the code of modules, given by dotted names, and of all that they import except `LEFT_OUT`."""
    return hash_code(modules, frozenset(LEFT_OUT))


def list_modules(stage: Stage, sections: Sections) -> list[str]:
    """Return the modules that a stage's code starts from: those of its row and of the components in use."""
    modules = set(stage.code)
    for name in stage.components:
        section, *attributes = name.split(".")
        selected = sections[section]
        for attribute in attributes:
            selected = getattr(selected, attribute)
        for component in selected if isinstance(selected, list | tuple) else [selected]:
            modules |= modules_of(component)
    return sorted(modules)


def modules_of(component: "ComponentOptions | type[ComponentOptions] | LibraryComponent") -> set[str]:
    """Return the modules of a component, and of the components that its options name, such as those of a mixture."""
    if isinstance(component, LibraryComponent):
        return _library_modules(component.registry, component.plain())
    return {component.module()}


def _library_modules(registry: "Registry", component: dict[str, Any]) -> set[str]:
    entry = registry.entry(component["name"])
    modules = {entry.module}
    for option in entry.component.options.values():
        if option.component:
            value = component.get(option.public_name, option.default)
            for choice in value if isinstance(value, list) else [value]:  # a name, or a dictionary of name and options
                modules |= _library_modules(registry, {"name": choice} if isinstance(choice, str) else choice)
    return modules
