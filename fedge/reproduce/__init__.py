"""The paper's tables and figures, reproduced: TOML files in, JSON lines, tables and figures out."""

from fedge.reproduce.campaign import Campaign, Stopped
from fedge.reproduce.jobs import Job, jobs
from fedge.reproduce.places import DATASETS, EXPERIMENTS
from fedge.reproduce.store import Store
from fedge.reproduce.tuning import Choices, tune

__all__ = ["DATASETS", "EXPERIMENTS", "Campaign", "Choices", "Job", "Stopped", "Store", "jobs", "tune"]
