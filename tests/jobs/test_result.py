from hydra.core.utils import JobReturn, JobStatus

from pipeswift_lightning.jobs.result import JobResult, JobState


def test_results_come_back_from_their_file(tmp_path) -> None:
    assert JobResult.read(tmp_path) is None
    for status, value, result in (
        (JobStatus.COMPLETED, 2, JobResult(state=JobState.COMPLETED, value=2.0)),
        (JobStatus.COMPLETED, None, JobResult(state=JobState.COMPLETED)),
        (
            JobStatus.FAILED,
            ValueError("first\nsecond"),
            JobResult(state=JobState.FAILED, error="ValueError: first"),
        ),
    ):
        made = JobResult.of(JobReturn(status=status, _return_value=value))
        made.write(tmp_path)
        assert made == result == JobResult.read(tmp_path)
