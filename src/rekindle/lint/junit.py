"""The verdicts as JUnit XML: one suite for each trace, one case for each fault."""

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from rekindle.lint.advice import advice_on
from rekindle.lint.as_json import sentence_of
from rekindle.lint.baseline import LintVerdict

_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_of(verdicts: Sequence[LintVerdict]) -> bytes:
    root = ElementTree.Element("testsuites", name="rekindle lint")
    for verdict in verdicts:
        root.append(_suite(verdict))
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document


def _suite(verdict: LintVerdict) -> ElementTree.Element:
    audit = verdict.audit
    suite = ElementTree.Element("testsuite", name=_xml(audit.name))
    said = f"amplification {audit.amplification:.3f}, allowed {verdict.allowed:.3f}"
    case = ElementTree.SubElement(suite, "testcase", classname=_xml(audit.name))
    case.set("name", "amplification")
    if verdict.is_passed:
        ElementTree.SubElement(case, "system-out").text = said
    else:
        ElementTree.SubElement(case, "failure", message=said)
    n_failures = int(not verdict.is_passed)
    for fault in audit.faults:
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(audit.name))
        case.set("name", _xml(fault.key))
        text = _xml(f"{sentence_of(fault)} {advice_on(fault.change.kind)}")
        if verdict.is_error(fault):
            n_failures += 1
            failure = ElementTree.SubElement(case, "failure", message=text)
            names = ", ".join(loss.request.name for loss in fault.losses)
            failure.text = _xml(f"- {fault.change.expected}\n+ {fault.change.got}\n{names}")
        else:
            ElementTree.SubElement(case, "system-out").text = text
    suite.set("tests", str(1 + len(audit.faults)))
    suite.set("failures", str(n_failures))
    return suite


def _xml(text: str) -> str:
    """Replace characters that XML cannot hold."""
    return _NO_XML.sub("\ufffd", text)
