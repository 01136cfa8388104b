"""Steps that are written down and may begin."""

from dataclasses import dataclass, field

from dprc_lightning.accounting.chained_log import ChainedLog
from dprc_lightning.errors import LedgerError


@dataclass(eq=False)
class Reservation:
    """Steps that are on disk and may begin: hands out their sequence numbers.

    Attributes:
        first: The first sequence number.
        count: How many steps were reserved.
        taken: How many were handed out.
    """

    first: int
    count: int
    _log: ChainedLog = field(repr=False)
    taken: int = 0
    _over: bool = field(default=False, repr=False)

    @property
    def remaining(self) -> int:
        """How many numbers can still be taken."""
        return 0 if self._over or not self._log.writable else self.count - self.taken

    def take(self) -> int:
        """Hand out the next sequence number. Take it before anything of the step is drawn.

        Returns:
            A number that no step of this ledger had before or will have again.

        Raises:
            LedgerError: If all are taken, or the ledger was closed, or a later reservation replaced this one.
        """
        if self._over or not self._log.writable:
            raise LedgerError(f"the reservation from step {self.first} on is over: reserve again")
        if self.taken == self.count:
            raise LedgerError(f"all {self.count} steps reserved from {self.first} on are taken: reserve again")
        self.taken += 1
        return self.first + self.taken - 1
