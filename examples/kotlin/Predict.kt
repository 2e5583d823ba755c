import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtSession
import ai.onnxruntime.TensorInfo
import android.graphics.Bitmap
import android.graphics.BitmapFactory
import android.graphics.Matrix
import androidx.exifinterface.media.ExifInterface
import java.nio.ByteBuffer
import org.json.JSONObject

/**
 * What an exported .onnx says of photos, on Android. Needs com.microsoft.onnxruntime:onnxruntime-android,
 * androidx.exifinterface:exifinterface, and Pixels.java of the folder beside this one.
 */
class Predictor(model: ByteArray) : AutoCloseable {
    private val environment = OrtEnvironment.getEnvironment()
    private val session: OrtSession = environment.createSession(model)

    // The description in the file: "classes", "task", and "input" with the scale and zero point of a pixel.
    private val told = JSONObject(session.metadata.customMetadata.getValue("fedmpq"))
    private val shape = (session.inputInfo.getValue("image").info as TensorInfo).shape.also { it[0] = 1 }

    val classes: List<String> = told.getJSONArray("classes").let { names -> List(names.length(), names::getString) }

    /** The likeliest class of the photo in a file. */
    fun predict(path: String): String {
        val pixels = read(path).resized(shape[1].toInt(), shape[2].toInt())
        // Pixels go in as they are, uint8 (batch, height, width, channels): normalisation is inside the file.
        val bytes = ByteBuffer.wrap(pixels.bytes)
        OnnxTensor.createTensor(environment, bytes, shape, OnnxJavaType.UINT8).use { image ->
            session.run(mapOf("image" to image)).use { result ->
                @Suppress("UNCHECKED_CAST")
                val logits = (result.get("logits").get().value as Array<FloatArray>)[0]
                return classes[logits.indices.maxByOrNull { logits[it] }!!]
            }
        }
    }

    /** The whole photo, upright as its EXIF orientation says; no inSampleSize, which gives other pixels. */
    private fun read(path: String): Pixels {
        val stored = BitmapFactory.decodeFile(path) ?: throw IllegalArgumentException("$path is no photo")
        val exif = ExifInterface(path)
        val turn = Matrix().apply {
            if (exif.isFlipped) postScale(-1f, 1f)
            postRotate(exif.rotationDegrees.toFloat())
        }
        val photo = Bitmap.createBitmap(stored, 0, 0, stored.width, stored.height, turn, false)
        val packed = IntArray(photo.width * photo.height)
        photo.getPixels(packed, 0, photo.width, 0, 0, photo.width, photo.height)
        return Pixels.ofColours(photo.height, photo.width, shape[3].toInt(), packed)
    }

    override fun close() = session.close()
}
