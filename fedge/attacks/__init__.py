"""Simulated adversaries: some of the clients lie, about their uploads, their weights or their data.

link = attacked(algorithm, federation, Attack("sign_flip"), share=0.1, seed=0)
fedge.train(algorithm, federation, rounds=50, link=link)
"""

from fedge.attacks.attack import KINDS, Attack, attackers
from fedge.attacks.backdoor import success
from fedge.attacks.link import Attacked, attacked

__all__ = ["KINDS", "Attack", "Attacked", "attacked", "attackers", "success"]
