"""What the HTML pages of the tools have in common: how they are rendered, and how a figure is drawn in them.

Why this room exists: ``hvdkit timeline report`` and ``hvdkit bench report`` write pages that need nothing else, with
the same escaping, the same Content-Security-Policy and the same drawings. The marks of a figure are
``hvdkit.timeline.drawing``'s.
"""
