"""The verifier that is exported with a task: the text of this function, with the task's data.

It must agree with `palestra.environments.platform.verify`, and use nothing but what a verifier finds where it runs:
`env`, `json`, `re` and the standard library.
"""

from __future__ import annotations

import json
import re


def grade(env, final_answer, task):
    import unicodedata

    def normal(text):
        words = unicodedata.normalize("NFKC", text).casefold().split()
        return " ".join(words).rstrip(".!")

    def read_answer(kind, text):
        if kind == "integer":
            return int(normal(text).replace(",", ""))
        if kind == "money":
            found = re.fullmatch(r"[$€]?\s*([\d,]+)(?:\.(\d{2}))?\s*(?:usd|eur|[$€])?", normal(text))
            if found is None:
                raise ValueError
            return int(found[1].replace(",", "")) * 100 + int(found[2] or 0)
        if kind == "set":
            return frozenset(normal(part) for part in text.split(",") if part.strip())
        return normal(text)

    def rows_of(database, name, table):
        rows = database.table(name).all()
        return {json.dumps([row[column] for column in table["key"]]): row for row in rows}

    def is_met(wanted, found, ids):
        kind, value = wanted
        if kind == "new":
            return ids.get(value, found) == found
        if kind == "text":
            return isinstance(found, str) and normal(found) == normal(value)
        return kind == "free" or value == found

    def fits(wanted, change, ids):
        if wanted["table"] != change["table"] or wanted["kind"] != change["kind"]:
            return False
        if wanted["kind"] == "insert":
            if not wanted["others"] and set(change["after"]) != set(wanted["fields"]):
                return False
        elif json.dumps(wanted["key"]) != change["key"] or set(change["fields"]) - set(wanted["fields"]):
            return False
        row = change["after"]
        return all(name in row and is_met(value, row[name], ids) for name, value in wanted["fields"].items())

    def changes_between(seed, current):
        found = []
        for name, table in task["tables"].items():
            was, now = rows_of(seed, name, table), rows_of(current, name, table)
            for key in sorted(set(was) | set(now)):
                before, after = was.get(key), now.get(key)
                if before is None or after is None:
                    kind = "delete" if after is None else "insert"
                    found.append({"table": name, "kind": kind, "key": key, "after": after or {}, "fields": []})
                    continue
                differ = [column for column in table["columns"] if before[column] != after[column]]
                if differ:
                    found.append({"table": name, "kind": "update", "key": key, "after": after, "fields": differ})
        return found

    def place(wanted, choices, taken, tried):
        for change in choices[wanted]:
            if change not in tried:
                tried.add(change)
                if change not in taken or place(taken[change], choices, taken, tried):
                    taken[change] = wanted
                    return True
        return False

    def ids_of_new_rows(found, expected):
        ids, unmade, used = {}, {}, set()
        for wanted in expected:
            kind, name = wanted["fields"].get("id", ["is", None])
            if kind != "new":
                continue
            fitting = [n for n, change in enumerate(found) if n not in used and fits(wanted, change, ids)]
            others = [one for one in expected if one is not wanted and ["new", name] in one["fields"].values()]
            best, most = None, -1
            for n in fitting:
                known = dict(ids, **{name: found[n]["after"]["id"]})
                references = sum(any(fits(one, change, known) for change in found) for one in others)
                if references > most:
                    best, most = n, references
            if best is None:
                unmade[name] = object()
            else:
                used.add(best)
                ids[name] = found[best]["after"]["id"]
        return dict(ids, **unmade)

    def matched(found, expected):
        ids = ids_of_new_rows(found, expected)
        choices = [[n for n, change in enumerate(found) if fits(wanted, change, ids)] for wanted in expected]
        taken = {}
        for wanted in range(len(expected)):
            place(wanted, choices, taken, set())
        return taken

    def changes_are_right(found, expected):
        return len(matched(found, expected)) == len(expected) == len(found)

    def goals_met(found):
        taken, checks, first = matched(found, task["expected"]), {}, 0
        for number, size in enumerate(task["goals"], 1):
            checks["goal " + str(number)] = set(range(first, first + size)) <= set(taken.values())
            first += size
        return dict(checks, **{"no other changes": len(taken) == len(found)})

    def verify_multi_app(found):
        apps = {}
        for name in sorted({one["table"].partition("_")[0] for one in found + task["expected"]}):
            parts = [[one for one in ones if one["table"].startswith(name + "_")] for ones in (found, task["expected"])]
            apps["app " + name] = changes_are_right(*parts)
        return apps

    def answer_is_right():
        wanted = task["answer"]
        try:
            given = read_answer(wanted["kind"], final_answer)
        except (ValueError, TypeError, AttributeError):
            return False
        return given == read_answer(wanted["kind"], wanted["text"])

    def calls_are_right(current):
        rows = current.table("_events").sort("turn").all()
        called = [((json.loads(row["call"]) or [""])[0], row["error"]) for row in rows]
        if task["calls"]["only"]:
            return called == [(tool, "") for tool in task["calls"]["tools"]]
        return set(task["calls"]["tools"]) <= {tool for tool, error in called if not error}

    env.instance.load()
    seed, current = env.db("seed"), env.db("current")
    found, changes = changes_between(seed, current), "changes" if task["expected"] else "no unexpected changes"
    apps = verify_multi_app(found) if task["apps"] else {}
    checks = goals_met(found) if task["goals"] else dict(apps) or {changes: changes_are_right(found, task["expected"])}
    if task["answer"] is not None:
        checks["answer"] = answer_is_right()
    if task["calls"] is not None:
        checks["process"] = calls_are_right(current)
    for name, is_right in apps.items():
        print(f"{name.capitalize()}: {int(is_right)}")  # noqa: T201 - App mail: 1
    for name, is_right in (("ERROR", False), ("SUCCESS", True)):
        listed = json.dumps([check for check, found in checks.items() if found is is_right])
        print(f">>> {name}_ACCUMULATOR >>>\n{listed}\n<<< {name}_ACCUMULATOR <<<")  # noqa: T201 - Fleet reads it there
    return all(checks.values())
