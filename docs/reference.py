"""References for the site, generated from the code: experiment file, commands, presets, metrics, columns, Python."""

import argparse
import functools
import importlib
import inspect
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import kairos_timesteps
from kairos.cli import COMMANDS
from kairos.config import Experiment
from kairos.evaluation.settings import MEASUREMENTS, METRICS, MetricOptions, is_higher_better
from kairos.losses.settings import LOSSES
from kairos.report.columns import FIRST_COLUMNS, LAST_COLUMNS, OPTIONAL_PROTOCOL, PROTOCOL, SPREAD
from kairos.stages import STAGES
from kairos.training.run_folder import METRICS_FIELDS, TIMING_FIELDS
from kairos_timesteps.preset_table import CONVENTIONS, TABLE

_BOUNDS = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
_FIRST = ("Strategy", "Draw", "density", "weighting", "preset", "names")
_BASES = ("base.Sampler", "base.FixedDensity", "base.TableDensity", "base.Weighting")
_BASES += ("options.option", "errors.ConfigError")
_ELSEWHERE = {"sampler": "samplers.md", "weighting": "weightings.md", "coupling": "couplings.md"}
_ELSEWHERE |= {"metrics": "metrics.md"}


@functools.cache
def schema() -> dict[str, Any]:
    """Return the JSON schema that `kairos schema` prints."""
    return Experiment.model_json_schema()


def experiment() -> str:
    """Describe every field of an experiment file, section by section."""
    top, parts = schema()["properties"], []
    simple = {key: node for key, node in top.items() if not _section(node)}
    sections = {key: node for key, node in top.items() if key not in simple}
    heads = {key: f"{key}.NAME" if "additionalProperties" in node else key for key, node in sections.items()}
    links = [f"[{key}](#{head.lower().replace('.', '')})" for key, head in heads.items()]
    parts += [f"Sections: {', '.join(links)}.", "## Fields outside of sections"]
    parts.append(fields(simple, schema().get("required", ())) + _components(simple))
    for key, node in sections.items():
        if (name := _section(node)) is not None:
            its = schema()["$defs"][name]
            head = f"## {heads[key]}"
            null = " Null, the default, is none." if {"type": "null"} in node.get("anyOf", ()) else ""
            parts += [head, its["description"] + null, fields(its["properties"], its.get("required", ()))]
            parts.append(_components(its["properties"]))
    return "\n\n".join(parts)


def commands() -> str:
    """Describe every command with its arguments."""
    parts = []
    for name, (module, help) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"kairos {name}", description=help[0].upper() + help[1:] + ".")
        importlib.import_module(module).add_arguments(name, parser)
        parts += _command(parser)
    return "\n\n".join(parts)


def _command(parser: argparse.ArgumentParser, level: int = 2) -> Iterator[str]:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
    yield f"{'#' * level} {parser.prog}\n\n{parser.description or ''}\n\n```text\n{parser.format_usage()}```"
    rows, inner = [], []
    for action in parser._actions:  # argparse has no other way to them
        if isinstance(action, argparse._SubParsersAction):
            inner += action.choices.values()
        elif not isinstance(action, argparse._HelpAction):
            word = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
            takes = "" if action.nargs == 0 or not action.option_strings else f" {word}"
            name = ", ".join(action.option_strings) + takes if action.option_strings else str(word)
            meaning = plain((action.help or "") % {**vars(action), "prog": parser.prog})
            rows.append([f"`{name}`", meaning + (" (required)" if action.option_strings and action.required else "")])
    if rows:
        yield table(["argument", "meaning"], rows)
    for each in inner:
        yield from _command(each, level + 1)


def presets() -> str:
    """Return a table of all presets, and a table of the conventions that its rows refer to."""
    rows = []
    for row in sorted(TABLE):
        options = ", ".join(f"{key}={_value(value)}" for key, value in row.options.items())
        components = [_linked(row.sampler, "samplers"), _linked(row.weighting, "weightings")]
        texts = [f"`{row.name}`", plain(row.help), f"`{options}`" if options else ""]
        rows.append([*texts, *components, f"[{row.convention}](#conventions)", plain(row.source)])
    head = ["preset", "formula or description", "options", "sampler", "weighting", "convention", "source"]
    conventions = [[name, each.meaning] for name, each in CONVENTIONS.items()]
    meanings = table(["convention", "time and signs"], [[plain(cell) for cell in row] for row in conventions])
    return f"{table(head, rows)}\n\n## Conventions\n\n{meanings}"


def api() -> str:
    """List all public names, and the base classes of users' strategies."""
    public = [name for name in kairos_timesteps.__all__ if name != "__version__"]
    names = [*_FIRST, *(name for name in public if name not in _FIRST), *_BASES]
    return "\n\n".join(f"::: kairos_timesteps.{name}" for name in names)


def metrics() -> str:
    """Describe every metric with its requirements, columns and options, below a table of all metrics."""
    options = described(schema()["$defs"]["EvaluationConfig"]["properties"]["metrics"])
    rows, parts = [], []
    for name, metric in METRICS.items():
        columns = ", ".join(f"`{column}`" for column in metric.columns)
        rows.append([f"[{name}](#{name})", metric.help(), columns, _better(metric.columns)])
        meanings = [[f"`{column}`", _better([column]), meaning] for column, meaning in metric.columns.items()]
        properties = options[name]["properties"]
        parts += [f"## {name}", inspect.getdoc(metric) or "", f"Needs: {_metric_needs(metric)}."]
        parts.append(table(["column", "better", "meaning"], meanings))
        parts.append(fields(properties) if properties else "No options.")
    overview = table(["metric", "value", "columns", "better"], rows)
    return "\n\n".join([overview, *parts])


def _better(columns: Iterable[str]) -> str:
    """Return the direction in which values of columns are better."""
    return ", ".join(dict.fromkeys("higher" if is_higher_better(column) else "lower" for column in columns))


def _metric_needs(metric: type[MetricOptions]) -> str:
    """Return the inputs of a metric in words: measurements of images with their extractor, or other requirements."""
    needs = []
    for measurement in (MEASUREMENTS[need] for need in metric.needs):
        if measurement.requires:
            needs.append(measurement.requires)
        else:
            images = "samples and of real images" if measurement.of_real_images else "samples"
            extractor = f"extractor `{metric.extractor}`" if metric.extractor else "any extractor"
            needs.append(f"{measurement.content}, of {images}; {extractor}")
    return "; ".join(needs)


def summary_columns() -> str:
    """Return a table of all columns of summary.csv, in the order of the file."""
    metric_columns = {}
    for name, metric in METRICS.items():
        for column, meaning in metric.columns.items():
            metric_columns[column] = f"{meaning} ([{name}](metrics.md#{name}))"
    spread = {"<column>_spread": SPREAD}
    columns = {**FIRST_COLUMNS, **metric_columns, **spread, **PROTOCOL, **OPTIONAL_PROTOCOL, **LAST_COLUMNS}
    return _meanings("column", columns)


def metrics_fields() -> str:
    """Return a table of the fields of a line of metrics.jsonl."""
    terms = {name: loss.help() for name, loss in LOSSES.items()}
    return _meanings("field", {**METRICS_FIELDS, **terms})


def stages() -> str:
    """Return a table of all stages: rule and modules, needed stages, fields, record and device."""
    head = ["stage", "needs", "fields", "without effect", "command", "code", "record", "PyTorch on"]
    rows = []
    for row in STAGES:
        command = f"`{row.command}`" if row.command else "by `analyse`"
        needs, fields, without_effect = (
            ", ".join(f"`{name}`" for name in names) for names in (row.needs, row.fields, row.no_effect)
        )
        code = ", ".join(f"`{module}`" for module in row.code)
        rows.append([row.name, needs, fields, without_effect, command, code, f"`{row.record_path}`", row.computes_on])
    return table(head, rows)


def timing_fields() -> str:
    """Return a table of the fields of a line of timing.jsonl."""
    return _meanings("field", TIMING_FIELDS)


def _meanings(kind: str, meanings: Mapping[str, str]) -> str:
    """Return a table of names and their meanings."""
    return table([kind, "meaning"], [[f"`{name}`", meaning] for name, meaning in meanings.items()])


def described(node: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the components that a field may name, as JSON schema with ``description`` and ``properties``, by name."""
    components = {}
    for each in [*node.get("anyOf", ()), *([node["items"]] if "items" in node else [])]:
        its = {**each.get("properties", {})}
        if name := its.pop("name", {}).get("const"):
            components[name] = {**each, "properties": its}
        else:
            components |= described(each)
    return components


def fields(properties: Mapping[str, Any], required: Collection[str] = ()) -> str:
    """Return a table with a row for each field: name, allowed values, default, meaning."""
    rows = []
    for key, node in properties.items():
        default = "required" if key in required else f"`{_value(_default(node))}`"
        rows.append([f"`{key}`", _allowed(node, key), default, plain(node.get("description", ""))])
    return table(["name", "allowed", "default", "meaning"], rows)


def _default(node: Mapping[str, Any]) -> Any:
    """Return a field's default; a component whose options have their defaults is only its name."""
    value = node.get("default")
    if isinstance(value, dict) and value.get("name") in described(node):
        its = described(node)[value["name"]]["properties"]
        value = {k: v for k, v in value.items() if k == "name" or v != its.get(k, {}).get("default")}
        return value["name"] if len(value) == 1 else value
    return value


def _components(properties: Mapping[str, Any]) -> str:
    """Describe each component that fields may name, except those with a separate page."""
    parts = [""]
    for key in (key for key in properties if key not in _ELSEWHERE):
        for name, its in described(properties[key]).items():
            parts.append(f"### {key}: {name}\n\n{plain(its['description'])}")
            parts.append(fields(its["properties"]) if its["properties"] else "No options.")
    return "\n\n".join(parts)


def _section(node: Mapping[str, Any]) -> str | None:
    """Return the name of the section's definition that a field refers to; None if the field is no section."""
    for each in (node, node.get("additionalProperties"), node.get("items"), *node.get("anyOf", ())):
        if isinstance(each, dict) and "$ref" in each:
            return str(each["$ref"]).rpartition("/")[2]
    return None


def _allowed(node: Mapping[str, Any], key: str) -> str:
    """Return the allowed values of a field, in words, as Markdown."""
    if names := described(node):
        has_many = "items" in node or any("items" in each for each in node.get("anyOf", ()))
        choice = "a list of names, each with or without options" if has_many else "a name, or a name with options"
        also = " or null" if {"type": "null"} in node.get("anyOf", ()) else ""
        if key in _ELSEWHERE:
            return f"{choice}: [{len(names)} of them]({_ELSEWHERE[key]}){also}"
        return f"{choice}: " + ", ".join(f"[{n}](#{key}-{n})" for n in names) + also
    if "enum" in node or "const" in node:
        return ", ".join(f"`{_value(value)}`" for value in dict.fromkeys(node.get("enum", [node.get("const")])))
    if "anyOf" in node:
        outer = {bound: node[bound] for bound in _BOUNDS if bound in node}
        kinds = [each if each.get("type") == "null" else outer | each for each in node["anyOf"]]
        return " or ".join(dict.fromkeys(_allowed(each, key) for each in kinds))
    if node.get("not") == {}:
        return "none is built in"
    kind = node.get("type", "a value")
    if kind == "array":
        return "list of " + _allowed(node.get("items", {}), key)
    words = {"string": "text", "object": "mapping", "boolean": "`true`, `false`", "null": "`null`"}
    kind = " or ".join(map(str, kind)) if isinstance(kind, list) else words.get(kind, kind)
    bounds = " and ".join(f"{word} {node[bound]:g}" for bound, word in _BOUNDS.items() if bound in node)
    pattern = f" `{node['pattern']}`" if "pattern" in node else ""
    return f"{kind} {bounds}".strip() + pattern


def _linked(specification: str, page: str) -> str:
    """Return a component of a preset as a link to its page, with the arguments; an empty text for no weighting."""
    name, _, arguments = specification.removesuffix(")").partition("(")
    return "" if name == "none" else f"[{name}]({page}.md#{name})" + (f" `{arguments}`" if arguments else "")


def plain(text: str) -> str:
    """Escape characters that have a meaning in Markdown."""
    return re.sub(r"([*_\[])", r"\\\1", text.replace("<", "&lt;"))


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False).strip('"')


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    whole = [head, ["---"] * len(head), *rows]
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in whole]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_PAGES = {"experiment": experiment, "commands": commands, "presets": presets, "metrics": metrics, "api": api}
_PAGES |= {"stages": stages}
_PAGES |= {"summary_columns": summary_columns, "metrics_fields": metrics_fields, "timing_fields": timing_fields}
PARTS = {name: (lambda generate=generate: (generate(), {})) for name, generate in _PAGES.items()}
