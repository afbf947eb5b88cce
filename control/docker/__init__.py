"""The Docker engine: the only part of control that talks to it. Decisions are made in `control.plan`; here they are carried out."""
