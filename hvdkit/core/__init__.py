"""How gradients travel, for every framework binding alike; imports no framework.

``layout`` says what lies where, ``control`` what ranks say beside their gradients.
"""
