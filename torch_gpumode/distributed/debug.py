"""A page for torch.distributed.debug: what all ranks' groups are doing, and whom they wait for.

    from torch.distributed.debug import start_debug_server
    from torch_gpumode.distributed import debug

    start_debug_server(handlers=debug.handlers())  # on every rank; torch 2.14 or newer

Then /gpumode on the server of rank 0 shows it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

try:
    from torch.distributed.debug._frontend import (
        DebugHandler,
        NavLink,
        Route,
        fetch_all,
        format_fetch_summary,
    )
except ImportError as error:
    raise ImportError(
        "torch.distributed.debug takes pages from torch 2.14 on, with the packages jinja2, "
        f"tabulate and aiohttp or requests: {error}"
    ) from error

from torch_gpumode.distributed import _backend
from torch_gpumode.distributed._flight_record import flight_record

if TYPE_CHECKING:
    from torch.distributed.debug._frontend import HTTPRequestHandler

_ENDPOINT = "gpumode_flight_record"

_TEMPLATE = """
{% extends "base.html" %}
{% block header %}
  <h1>{% block title %}torch_gpumode{% endblock %}</h1>
{% endblock %}
{% block content %}
  {% if fetch_summary %}<pre>{{ fetch_summary | e }}</pre>{% endif %}
  {% for rank in ranks %}
    <h2>Rank {{ rank.number }}</h2>
    {% for failure in rank.failures %}<p>{{ failure | e }}</p>{% endfor %}
    <table>
      <tr><th>group</th><th>op</th><th>number</th><th>state</th><th>epoch</th><th>inputs</th>
          <th>duration, ms</th><th>came last</th></tr>
      {% for entry in rank.entries %}
        <tr><td>{{ entry.process_group[1] | e }}</td><td>{{ entry.profiling_name | e }}</td>
            <td>{{ entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id }}</td>
            <td>{{ (entry.error or entry.state) | e }}</td><td>{{ entry.epoch }}</td>
            <td>{{ entry.input_sizes }}</td>
            <td>{{ "%.3f" | format(entry.duration_ms) if entry.duration_ms is defined }}</td>
            <td>{% if entry.straggler is defined %}rank {{ entry.straggler }},
                {{ "%.3f" | format(entry.waited_ms) }} ms after the first{% endif %}</td></tr>
      {% endfor %}
    </table>
  {% endfor %}
{% endblock %}
"""


def _answer(count: str) -> str:
    """On each rank: its flight record, of which the last `count` ops."""
    record = flight_record()
    record["entries"] = record["entries"][-max(1, int(count or 50)) :]
    return json.dumps(record)


_backend.C.serve(_ENDPOINT, __name__, _answer.__name__)


class FlightRecordPage(DebugHandler):
    """The page /gpumode: the last ops of every rank, and why its groups failed."""

    def routes(self) -> list[Route]:
        return [Route("/gpumode", self._handle)]

    def nav_links(self) -> list[NavLink]:
        return [NavLink("/gpumode", "torch_gpumode")]

    def templates(self) -> dict[str, str]:
        return {"gpumode.html": _TEMPLATE}

    def _handle(self, request: HTTPRequestHandler) -> bytes:
        count = request.get_query_arg("count", default=50, type=int)
        addresses, responses = fetch_all(_ENDPOINT, f"count={count}", timeout=self.fetch_timeout)
        ranks = []
        for number, response in enumerate(responses):
            if response.status_code != 200:
                continue  # the summary names it
            record = response.json()
            failures = [status["failure"] for status in record["pg_status"].values()]
            ranks.append(
                {
                    "number": number,
                    "failures": [failure for failure in failures if failure],
                    "entries": record["entries"],
                }
            )
        return request.frontend.render_template(
            "gpumode.html", fetch_summary=format_fetch_summary(addresses, responses), ranks=ranks
        )

    def dump(self) -> str:
        addresses, responses = fetch_all(_ENDPOINT, timeout=self.fetch_timeout)
        parts = [format_fetch_summary(addresses, responses) or ""]
        parts += [response.text for response in responses if response.status_code == 200]
        return "\n".join(parts)

    def dump_filename(self) -> str:
        return "gpumode"


def handlers() -> list[DebugHandler]:
    """Returns torch's pages and ours, for `start_debug_server(handlers=...)`."""
    from torch.distributed.debug._debug_handlers import default_handlers

    return [*default_handlers(), FlightRecordPage()]
